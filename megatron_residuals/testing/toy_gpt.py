# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny deterministic GPT on stock Megatron-Core: any parallel layout against one process.

    one = run_toy(ToyGPT())
    two = run_toy(ToyGPT(pp=2, vpp=2))      # forks two ranks, runs the host's interleaved schedule
    assert one.losses == two.losses

Weights depend on the global parameter name and the seed, data on the seed: every layout computes
the same function, through the host's own schedules (`get_forward_backward_func`). With data or
context parallelism the ranks' gradients are parts of a mean: train with `toy_training`, which
wraps the toy as the host's training loop does.

Precision. With `dtype=torch.float64` all that depends on weights or data is float64: parameters
(norms included: chunks are cast after construction), activations, pipeline messages, and the
attention softmax (the host upcasts fp16 and bf16 only, whatever `attention_softmax_in_fp32` says).
The host's vocabulary-parallel cross entropy would cast logits to float32; hence the loss is
computed here, from the logits, in their dtype. Rotary angles are float32 constants in any layout.
Leave the fusions and `fp32_residual_connection` off, as `TransformerConfig` does.

Call `megatron_residuals.testing.install()` before importing this module: it imports Megatron-Core.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from megatron_residuals.mcore.compat import HYBRID_MODEL, stock_hybrid_stack
from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.toy_weights import (
    Chunk,
    Initialise,
    default_initialise,
    full_grads,
    initialise_chunk,
)

Spec: TypeAlias = ModuleSpec | TransformerBlockSubmodules
SpecLike: TypeAlias = Spec | Callable[[TransformerConfig, int | None], Spec] | None
"""A layer or block spec, a function of (config, vp_stage) that makes one, or None: local layers."""


@dataclasses.dataclass(frozen=True)
class ToyGPT:
    """Sizes and layout of the toy; `dataclasses.replace` makes another layout of the same model."""

    num_layers: int = 4
    hidden_size: int = 32
    num_heads: int = 4
    vocab_size: int = 64
    seq_length: int = 16
    micro_batch_size: int = 2
    num_microbatches: int = 4
    """Micro-batches of a step, all data-parallel ranks together: they take them in turns."""
    seq_lengths: tuple[int, ...] | None = None
    """Length of each micro-batch, instead of `seq_length` for all (`variable_seq_lengths`)."""
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    cp: int = 1
    """Context-parallel ranks; the host's local attention has none, a spec must bring its own."""
    ep: int = 1
    """Expert-parallel ranks, out of the data-parallel ones."""
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 1234
    tied_embeddings: bool = False
    positions: Literal["rope", "learned_absolute"] = "rope"
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    bias: bool = True
    dropout: float = 0.0
    pattern: str | None = None
    """Of a hybrid model, which the toy is then instead of a GPT; its layers are `num_layers`."""
    config_overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Further arguments of `TransformerConfig`; they win over everything above."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sequence length of each micro-batch."""
        return self.seq_lengths or (self.seq_length,) * self.num_microbatches

    @property
    def world_size(self) -> int:
        """Ranks of all kinds of parallelism."""
        return self.tp * self.pp * self.dp * self.cp


class ToyResult(NamedTuple):
    """What a step of the toy computed, merged over its ranks."""

    losses: list[float]
    """Mean loss of each micro-batch."""
    grads: dict[str, torch.Tensor]
    """Gradient of the mean of the losses, by global parameter name, whole."""


def setup_parallel(toy: ToyGPT) -> None:
    """Initialises the host's parallel state and random states on this rank of `run_ranks`."""
    parallel_state.initialize_model_parallel(
        toy.tp,
        toy.pp,
        toy.vpp,
        context_parallel_size=toy.cp,
        expert_model_parallel_size=toy.ep,
    )
    model_parallel_cuda_manual_seed(toy.seed)


def transformer_config(toy: ToyGPT) -> TransformerConfig:
    """The host's configuration of the toy.

    Under VPP the point-to-point calls overlap and are not batched. Batched, with two pipeline ranks
    whose next and previous rank are one peer, the stock interleaved schedule mixes up messages.
    """
    arguments: dict[str, Any] = dict(
        num_layers=toy.num_layers,
        hidden_size=toy.hidden_size,
        num_attention_heads=toy.num_heads,
        normalization=toy.normalization,
        add_bias_linear=toy.bias,
        hidden_dropout=toy.dropout,
        attention_dropout=toy.dropout,
        tensor_model_parallel_size=toy.tp,
        pipeline_model_parallel_size=toy.pp,
        virtual_pipeline_model_parallel_size=toy.vpp,
        context_parallel_size=toy.cp,
        expert_model_parallel_size=toy.ep,
        sequence_parallel=toy.sequence_parallel,
        params_dtype=toy.dtype,
        pipeline_dtype=toy.dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    if toy.vpp is not None:
        arguments.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if toy.seq_lengths is not None:
        # The host insists on this dispatcher, in dense models as well.
        arguments.update(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    arguments.update(toy.config_overrides)
    latent = arguments.get("multi_latent_attention")
    return (MLATransformerConfig if latent else TransformerConfig)(**arguments)


def build_chunks(
    toy: ToyGPT, spec: SpecLike = None, *, initialise: Initialise = default_initialise
) -> list[Chunk]:
    """This rank's model chunks, one per virtual stage, with weights that no layout changes.

    Args:
        initialise: gives every parameter its full weight by global name (`decoder.layers.3.…`), or
            None to keep the module's own; see `toy_weights.default_initialise`.
    """
    config = transformer_config(toy)
    last_rank = parallel_state.get_pipeline_model_parallel_world_size() - 1
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk_index in range(toy.vpp or 1):
        vp_stage = None if toy.vpp is None else chunk_index
        options: dict[str, Any] = dict(
            vocab_size=toy.vocab_size,
            max_sequence_length=max(toy.lengths),
            pre_process=rank == 0 and chunk_index == 0,
            post_process=rank == last_rank and chunk_index == (toy.vpp or 1) - 1,
            position_embedding_type=toy.positions,
            share_embeddings_and_output_weights=toy.tied_embeddings,
            vp_stage=vp_stage,
        )
        if toy.pattern is not None:
            chunk = _hybrid_chunk(toy, spec, config, options)
        else:
            layers = _resolve(spec, config, vp_stage)
            prediction = _prediction_spec(layers, config, vp_stage)
            given: Any = layers  # the host takes the specs of all layers too
            chunk = GPTModel(config, given, mtp_block_spec=prediction, **options)
        # Torch's norms are born float32, whatever `params_dtype` says.
        chunk.to(toy.dtype)
        initialise_chunk(chunk, initialise, toy.seed)
        chunks.append(chunk)
    return chunks


def train_step(
    chunks: Sequence[Chunk],
    toy: ToyGPT,
    *,
    forward_only: bool = False,
    keep_grads: bool = False,
) -> list[float]:
    """Runs one step of the host's schedule; gradients are left in `parameter.grad`, replaced.

    Args:
        keep_grads: leave the gradients to a wrapper around the chunks.

    Returns:
        The mean loss of each micro-batch on ranks of the last stage, an empty list elsewhere.
    """
    for chunk in chunks:
        chunk.train(not forward_only)
        if not forward_only and not keep_grads:
            chunk.zero_grad(set_to_none=True)
    iterators = [micro_batches(toy) for _ in chunks]
    store = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iterators if toy.vpp is not None else iterators[0],
        model=list(chunks) if toy.vpp is not None else chunks[0],
        num_microbatches=toy.num_microbatches // toy.dp,
        seq_length=max(toy.lengths),
        micro_batch_size=toy.micro_batch_size,
        decoder_seq_length=max(toy.lengths),
        forward_only=forward_only,
    )
    return [entry["loss"].item() for entry in store]


def run_toy(
    toy: ToyGPT,
    spec: SpecLike = None,
    *,
    initialise: Initialise = default_initialise,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> ToyResult:
    """One training step of the toy on `tp * pp` forked ranks.

    Raises:
        RankFailure: a rank failed or hung.
        RuntimeError: two ranks hold the same parameter and disagree on its gradient, bit for bit.
    """
    results = run_ranks(toy.world_size, _step, toy, spec, initialise, timeout_s=timeout_s, env=env)
    return merge(results)


def merge(results: Sequence[ToyResult]) -> ToyResult:
    """One result from those of the ranks, which must agree exactly on what several of them hold."""
    losses: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    faults = []
    for rank, result in enumerate(results):
        if losses and result.losses and losses != result.losses:
            faults.append(f"losses: rank {rank} has {result.losses}, a lower rank {losses}")
        losses = losses or result.losses
        for name, grad in result.grads.items():
            known = grads.setdefault(name, grad)
            if not torch.equal(known, grad):
                difference = (known - grad).abs().max().item()
                faults.append(f"gradient of {name}: rank {rank} differs by {difference:.3e}")
    if faults:
        raise RuntimeError(
            "ranks that hold the same parameter must agree on it (is a parameter used on sequence "
            "shards without `sequence_parallel` set on it?):\n  " + "\n  ".join(faults)
        )
    return ToyResult(losses, grads)


def micro_batches(toy: ToyGPT) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens and labels [b, s], positions [b, s] and the causal mask [1, 1, s, s].

    Of all micro-batches those of this rank's share of data parallelism, and of each sequence this
    rank's share of context parallelism (then the mask, which is of whole sequences, means nothing).
    """
    generator = torch.Generator().manual_seed(toy.seed)
    for index, length in enumerate(toy.lengths):
        tokens = torch.randint(
            toy.vocab_size, (toy.micro_batch_size, length + 1), generator=generator
        )
        if toy.dp > 1 and index % toy.dp != parallel_state.get_data_parallel_rank():
            continue
        own = own_positions(toy, length)
        yield {
            "tokens": tokens[:, :-1][:, own].contiguous(),
            "labels": tokens[:, 1:][:, own].contiguous(),
            "positions": own.expand(toy.micro_batch_size, -1).contiguous(),
            "mask": torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
        }


def own_positions(toy: ToyGPT, length: int, rank: int | None = None) -> torch.Tensor:
    """Positions [s / cp] of a context-parallel rank (this one).

    They are the rank-th of 2 cp slices and the rank-th from the end, as in the host's
    `get_batch_on_this_cp_rank`.
    """
    if toy.cp == 1:
        return torch.arange(length)
    if rank is None:
        rank = parallel_state.get_context_parallel_rank()
    slices = torch.arange(length).chunk(2 * toy.cp)
    return torch.cat((slices[rank], slices[2 * toy.cp - 1 - rank]))


def _step(toy: ToyGPT, spec: SpecLike, initialise: Initialise) -> ToyResult:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec, initialise=initialise)
    losses = train_step(chunks, toy)
    return ToyResult(losses, full_grads(chunks))


def _hybrid_chunk(
    toy: ToyGPT, spec: SpecLike, config: TransformerConfig, options: dict[str, Any]
) -> Chunk:
    make: Any = spec or _stock_stack
    stack = spec if isinstance(spec, ModuleSpec) else make(config, None)
    module, _, model = HYBRID_MODEL.rpartition(".")
    build = getattr(importlib.import_module(module), model)
    chunk: Chunk = build(config, stack, hybrid_layer_pattern=toy.pattern, **options)
    return chunk


def _stock_stack(config: TransformerConfig, _: int | None) -> ModuleSpec:
    stack: ModuleSpec = stock_hybrid_stack(config)
    return stack


def _resolve(spec: SpecLike, config: TransformerConfig, vp_stage: int | None) -> Spec:
    if spec is None:
        return get_gpt_layer_local_spec(normalization=config.normalization)
    # A ModuleSpec is callable itself: ask for its type first.
    if isinstance(spec, (ModuleSpec, TransformerBlockSubmodules)):
        return spec
    return spec(config, vp_stage)


def _prediction_spec(layers: Spec, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The spec of multi-token prediction, from the decoder's layers where the host takes them."""
    if not config.mtp_num_layers:
        return None
    stock = isinstance(layers, ModuleSpec) and layers.module is TransformerLayer
    if not stock and not getattr(layers, "layer_specs", None):
        layers = get_gpt_layer_local_spec(normalization=config.normalization)
    return get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage)


def _forward_step(
    batches: Iterator[dict[str, torch.Tensor]], model: GPTModel
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    batch = next(batches)
    if get_model_config(model).mtp_num_layers is not None:
        # the host predicts, and weighs the losses of, further tokens only where it has labels; 0.16
        # asks for labels where there are no further tokens too
        losses = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])
        return losses, _mean

    output = model(batch["tokens"], batch["positions"], batch["mask"])

    def loss_function(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # [b, s, vocab / tp] -> [b * s, vocab]; the host's own loss would cast to float32.
        logits = gather_from_tensor_model_parallel_region(logits).flatten(0, 1)
        return _mean(
            torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        )

    return output, loss_function


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the host wants of a loss: this rank's part of a sum over context-parallel ranks."""
    loss = losses.mean()
    part = loss / parallel_state.get_context_parallel_world_size()
    return part, {"loss": loss.detach().clone()}
