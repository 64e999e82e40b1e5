# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model on one rank, and what the host's own sublayers keep for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from megatron_residuals.pipeline.layout import ATTENTION, GPT_LAYER, MLP
from megatron_residuals.text import count_faults, raise_faults


@dataclass(frozen=True)
class LatentSizes:
    """Of multi-latent attention, in place of one head size.

    Attributes:
        query_rank: of the compressed queries; None: they are projected in one step.
        rank: of the compressed keys and values.
        head_size: of a query or key without the part that rotates, which has ``rope_size`` more.
        value_size: of a value.
    """

    query_rank: int | None
    rank: int
    head_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True)
class MambaSizes:
    """Of a Mamba layer: the width of its inner vectors, and of a state, of which each head has one.

    Groups of heads share what writes to and reads from the states.
    """

    inner: int
    heads: int
    state: int = 128
    groups: int = 8

    @classmethod
    def of(cls, hidden_size: int, head_size: int = 64) -> MambaSizes:
        """As the host completes them: inner vectors twice as wide as the model."""
        return cls(2 * hidden_size, 2 * hidden_size // head_size)

    @property
    def projected(self) -> int:
        """Width of the projection in front: gate, vector, what writes, what reads, step."""
        return 2 * self.inner + 2 * self.groups * self.state + self.heads


@dataclass(frozen=True)
class ModelSizes:
    """What the bytes of activations depend on; the whole model's sizes, and how they are split.

    Attributes:
        query_groups: of grouped-query attention; None: as many as heads.
        kv_channels: of one query, key or value; None: hidden_size / num_heads.
        latent: of multi-latent attention; None: of the ordinary one.
        expert_ffn_hidden_size: what one token goes through in a layer of experts of a hybrid
            model; None: `ffn_hidden_size`.
        mamba: of its Mamba layers; None: `MambaSizes.of` the hidden size.
        qk_norm: whether queries and keys are normalised, each head by itself.
        gated: whether the MLP is gated (SwiGLU, GeGLU), so that its first projection is doubled.
        rope: whether rotary positions are applied to queries and keys.
        vocab_size: 0 leaves the logits out of account.
        unfused_rms_norm: whether the norms are torch's RMSNorm as it runs on a CPU, which keeps its
            input in float32 and what it normalised, instead of just its input.
        element_bytes: of activations; what is computed in float32 or wider has `wide_bytes`.
        logit_bytes: what the loss keeps for each logit. The host's keeps float32.
        host_layer_bytes: of one GPT layer's attention and MLP on one rank, for layers that are not
            the host's local ones; None: as `host_bytes` says.
        fused: whether layers are estimated as fused ones, each sublayer by itself: with "flash" or
            "unfused" attention; "" for the host's local ones.

    Raises:
        ValueError: a size is out of range, or ranks do not divide what is split over them (all
            faults in one message).
    """

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    query_groups: int | None = None
    kv_channels: int | None = None
    latent: LatentSizes | None = None
    expert_ffn_hidden_size: int | None = None
    mamba: MambaSizes | None = None
    qk_norm: bool = False
    gated: bool = False
    rope: bool = True
    unfused_rms_norm: bool = False
    vocab_size: int = 0
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    element_bytes: int = 2
    logit_bytes: int = 4
    host_layer_bytes: int | None = None
    fused: str = ""

    def __post_init__(self) -> None:
        counts = ("seq_length", "micro_batch_size", "hidden_size", "ffn_hidden_size", "num_heads")
        faults = count_faults(
            1, **{name: getattr(self, name) for name in (*counts, "groups", "tp", "cp")}
        )
        faults += count_faults(0, vocab_size=self.vocab_size)
        if not faults:
            faults = self._split_faults()
        raise_faults("sizes", faults)

    def _split_faults(self) -> list[str]:
        parts = self.cp * (self.tp if self.sequence_parallel else 1)
        one_size = self.num_heads if self.kv_channels is None and self.latent is None else 1
        checks = (
            ("hidden_size", self.hidden_size, "heads", one_size),
            ("num_heads", self.num_heads, "query groups", self.groups),
            ("num_heads", self.num_heads, "tensor-parallel ranks", self.tp),
            ("ffn_hidden_size", self.ffn_hidden_size, "tensor-parallel ranks", self.tp),
            ("seq_length", self.seq_length, "ranks (cp, and tp with sequence parallelism)", parts),
        )
        return [
            f"{name} {size} does not divide over {count} {what}; use a multiple of {count}."
            for name, size, what, count in checks
            if size % count
        ]

    @property
    def groups(self) -> int:
        """Groups of keys and values; as many as heads without grouping."""
        return self.num_heads if self.query_groups is None else self.query_groups

    @property
    def head_size(self) -> int:
        """Of one query, key or value of ordinary attention."""
        return self.kv_channels or self.hidden_size // self.num_heads

    @property
    def wide_bytes(self) -> int:
        """Of an element computed in float32, or in float64 where activations are."""
        return max(self.element_bytes, 4)

    @property
    def region_tokens(self) -> int:
        """Tokens of a micro-batch inside attention and MLP, on one rank."""
        return self.seq_length // self.cp * self.micro_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on the residual path and in the norms, on one rank."""
        return self.region_tokens // (self.tp if self.sequence_parallel else 1)

    @property
    def norm_keeps_input(self) -> bool:
        """Whether a norm keeps a reference to its input, not a copy in float32."""
        return not (self.unfused_rms_norm and self.element_bytes < self.wide_bytes)

    @property
    def norm_bytes(self) -> int:
        """What a norm keeps for itself: mean and deviation, and what it has computed otherwise."""
        rows = (2 - self.norm_keeps_input) if self.unfused_rms_norm else 0
        numbers = rows * self.hidden_size + (1 if self.unfused_rms_norm else 2)
        return numbers * self.tokens * self.wide_bytes

    @property
    def row_bytes(self) -> int:
        """One `[s, b, h]` tensor of the residual path on one rank."""
        return self.tokens * self.hidden_size * self.element_bytes


def host_bytes(sizes: ModelSizes, kind: str) -> int:
    """What autograd keeps inside one sublayer of a kind, its input apart.

    Bytes on one rank, one micro-batch, of the host's *local* layer with unfused operations.

    With q = tokens x heads/tp x head size, in elements:

        attention   context q, and
                      equal heads, rotary     rotated queries q, keys q; the projection 3q, of which
                                              the values are a view
                      equal heads, no rotary  the projection 3q
                      grouped                 queries q, repeated keys q and values q; without
                                              rotary and with one group on the rank, in place of
                                              the queries the projection that they are a view of
                    cos and sin of queries and of keys: 4 x sequence x head size
                    probabilities b x heads/tp x s x s, in 16-bit models once more in float32
        MLP         plain   2 x tokens x ffn/tp: argument and value of the activation
                    gated   5 x tokens x ffn/tp: both halves, silu, the other factor, the product

    The input of each (the norm's output) belongs to the residual path. Assumes no dropout, softmax
    in float32 for 16-bit models, no fused kernels, no bias after the output projections that would
    be kept (the host keeps none). With latent attention or normalised queries it is an estimate:
    what fused layers keep, and the probabilities. Layers of Transformer Engine keep other things;
    measure one, and give its bytes as ``ModelSizes.host_layer_bytes``, which then all stand with
    its attention. A Mamba layer is an estimate everywhere.

    Raises:
        ValueError: no such kind of sublayer is known.
    """
    if sizes.host_layer_bytes is not None:
        if kind not in GPT_LAYER:
            raise ValueError(f"a layer was measured of a GPT; this one has a sublayer {kind!r}.")
        return sizes.host_layer_bytes if kind == ATTENTION else 0
    known = FUSED if sizes.fused else LOCAL
    if kind not in known:
        raise ValueError(f"a sublayer is {kind!r}; sizes are known of {', '.join(known)}.")
    return known[kind](sizes)


def _attention_bytes(sizes: ModelSizes) -> int:
    element, tokens = sizes.element_bytes, sizes.region_tokens
    heads, sequence = sizes.num_heads // sizes.tp, sizes.seq_length // sizes.cp
    softmax = _scores(sizes) * (element if element >= 4 else element + 4)
    if sizes.latent is not None or sizes.qk_norm:
        return _attention_values(sizes) * element + softmax
    queries = tokens * heads * sizes.head_size
    if sizes.groups == sizes.num_heads:
        projected = 5 * queries if sizes.rope else 3 * queries
    else:
        keys = 0 if sizes.rope or sizes.groups > sizes.tp else tokens * sizes.head_size
        projected = 3 * queries + 2 * keys
    angles = 4 * sequence * sizes.head_size if sizes.rope else 0
    return (queries + projected + angles) * element + softmax


def _mlp_bytes(sizes: ModelSizes) -> int:
    ffn = sizes.region_tokens * sizes.ffn_hidden_size // sizes.tp
    return (5 if sizes.gated else 2) * ffn * sizes.element_bytes


def _of_experts(mlp_bytes: Callable[[ModelSizes], int]) -> Callable[[ModelSizes], int]:
    """Of a layer of experts, as an MLP as wide as what one token goes through."""

    def expert_bytes(sizes: ModelSizes) -> int:
        width = sizes.expert_ffn_hidden_size or sizes.ffn_hidden_size
        return mlp_bytes(dataclasses.replace(sizes, ffn_hidden_size=width))

    return expert_bytes


def _mamba_bytes(sizes: ModelSizes) -> int:
    """What is projected, what the scan gives, and the gated norm behind it."""
    mamba = sizes.mamba or MambaSizes.of(sizes.hidden_size)
    width = mamba.projected + 2 * mamba.inner
    return sizes.region_tokens * width // sizes.tp * sizes.element_bytes


def flash_layer_bytes(sizes: ModelSizes, *, unfused_attention: bool = False) -> int:
    """Estimate of the same for fused layers with flash attention, attention and MLP together.

    Kept: the projection of queries, keys and values, queries and keys once more if they are rotated
    or normalised, context, one float32 number per token and head, and of the MLP what goes into the
    activation and what comes out of it. Nothing grows with s x s, unless attention alone is unfused
    and keeps its probabilities. Measure a layer where it matters: versions of Transformer Engine
    differ.
    """
    attention = "unfused" if unfused_attention else "flash"
    return _fused_attention_bytes(dataclasses.replace(sizes, fused=attention)) + _fused_mlp_bytes(
        sizes
    )


def _fused_attention_bytes(sizes: ModelSizes) -> int:
    tokens, heads = sizes.region_tokens, sizes.num_heads // sizes.tp
    attention = _attention_values(sizes) * sizes.element_bytes + 4 * heads * tokens
    if sizes.fused == "unfused":
        attention += _scores(sizes) * sizes.element_bytes
    return attention


def _fused_mlp_bytes(sizes: ModelSizes) -> int:
    mlp = (3 if sizes.gated else 2) * sizes.ffn_hidden_size // sizes.tp * sizes.element_bytes
    return sizes.region_tokens * mlp


def _attention_values(sizes: ModelSizes) -> int:
    """Elements of queries, keys, values and context, and of what they are made from.

    Latent attention keeps what is compressed before and after its norm, on the tokens of the
    residual path, with the one rotated part of all keys beside it.
    """
    heads, latent = sizes.num_heads // sizes.tp, sizes.latent
    if latent is not None:
        head = 2 * (latent.head_size + latent.rope_size) + 2 * latent.value_size
        compressed = 2 * (latent.query_rank or 0) + 2 * latent.rank + latent.rope_size
        return sizes.region_tokens * heads * head + sizes.tokens * compressed
    groups = max(1, sizes.groups // sizes.tp)
    # values are a view of the projection, which stays whole beside what its queries, keys become
    made = heads + groups if sizes.rope or sizes.qk_norm else 0
    vectors = 2 * heads + 2 * groups + made
    return sizes.region_tokens * vectors * sizes.head_size


def _scores(sizes: ModelSizes) -> int:
    """Attention's scores, one for each query, key and head of this rank."""
    queries = sizes.seq_length // sizes.cp
    return sizes.micro_batch_size * sizes.num_heads // sizes.tp * queries * sizes.seq_length


LOCAL = {
    ATTENTION: _attention_bytes,
    "mla": _attention_bytes,
    MLP: _mlp_bytes,
    "moe": _of_experts(_mlp_bytes),
    "mamba": _mamba_bytes,
}
"""What the host's local sublayers keep, by their kind."""
FUSED = {
    ATTENTION: _fused_attention_bytes,
    "mla": _fused_attention_bytes,
    MLP: _fused_mlp_bytes,
    "moe": _of_experts(_fused_mlp_bytes),
    "mamba": _mamba_bytes,
}
"""What fused ones keep."""
