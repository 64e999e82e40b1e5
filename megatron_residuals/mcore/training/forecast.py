# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""From the host's own arguments and configuration to what the planner predicts from."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import host_version, stage_layout
from megatron_residuals.mcore.spec import check_layers
from megatron_residuals.mcore.support import check_options, host_faults
from megatron_residuals.mcore.training.passed_over import passed_over
from megatron_residuals.mcore.training.reading import Printed, Reading, in_the_hosts_words, quiet
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.planner.memory import MemoryPlan, Prediction
from megatron_residuals.planner.sizes import LatentSizes, MambaSizes, ModelSizes, flash_layer_bytes

ROTARY = ("rope", "yarn", "mrope")
NO_VOCABULARY = """\
the vocabulary has the size of a tokenizer that is not here: logits are left out; --vocab-size \
tells it"""
WAITS_FOR_SENDS_FROM = Version("0.18")


@dataclass(frozen=True)
class Forecast:
    """A launch in the planner's terms.

    Attributes:
        plan: layers, mechanism, sizes and micro-batches of one replica.
        stock: whether the launch runs the host's own block.
        host_full: layers in a checkpoint of the host's full/uniform recompute; 0 without it.
        overlap: of messages with passes, as the simulator calls it.
        waits_for_sends: likewise.
        heading: ranks, replicas and the host that has read the launch, in one line.
        remarks: what the prediction assumes or leaves out, a line each.
    """

    plan: MemoryPlan
    stock: bool
    host_full: int
    overlap: str
    waits_for_sends: bool
    heading: str
    remarks: tuple[str, ...]

    @property
    def transfer_plan(self) -> TransferPlan:
        """What crosses the stages."""
        return self.plan.transfer_plan(self.plan.residual)

    @property
    def prediction(self) -> Prediction:
        """What the launch itself keeps."""
        if self.stock and self.host_full < 2:
            return self.plan.stock_full if self.host_full else self.plan.stock
        return self.plan.host_full(self.host_full) if self.host_full else self.plan.predict()


def forecast(
    reading: Reading,
    residual: ResidualConfig | None,
    *,
    for_gpus: bool = True,
    host_layer_bytes: int | None = None,
) -> Forecast:
    """What a launch means for the planner.

    Args:
        residual: what replaces the residual connection; None runs the host's own block.
        host_layer_bytes: kept by one layer's attention and MLP, if that is known.

    Raises:
        HostRefusalError: what the host says when it builds the model.
        ValueError: a combination that `mcore.support` refuses, or a model that is neither a GPT nor
            a hybrid one, or has layers of which no sizes are known.
    """
    args, config, printed = reading.args, reading.config, Printed()
    _refuse_other_models(args)
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if residual is not None:
        check_options(config, args, residual)
        if pattern is None:
            check_layers(config)
    _refuse_ranks(args)
    with quiet(printed), in_the_hosts_words(printed):
        layout = stage_layout(config, args.pipeline_model_parallel_size, pattern)
        vocab_size = _vocabulary(args)
    sizes, size_remarks = model_sizes(
        args, config, vocab_size=vocab_size, for_gpus=for_gpus, host_layer_bytes=host_layer_bytes
    )
    if not vocab_size:
        size_remarks.append(NO_VOCABULARY)
    interleaved = layout.num_chunks > 1
    plan = MemoryPlan(
        layout,
        residual or ResidualConfig(),
        sizes,
        max(reading.microbatches),
        config.microbatch_group_size_per_vp_stage if interleaved else None,
    )
    plan.predict()  # finds what is wrong with the schedule
    remarks = (*reading.notes, *host_faults(config), *_batches(reading), *size_remarks)
    return Forecast(
        plan,
        stock=residual is None,
        host_full=_host_full(config),
        overlap=_overlap(config),
        waits_for_sends=host_version() >= WAITS_FOR_SENDS_FROM,
        heading=_heading(args),
        remarks=(*remarks, *_recompute(config), *_left_out(reading)),
    )


def _refuse_other_models(args: argparse.Namespace) -> None:
    if getattr(args, "decoder_num_layers", None) is not None:
        raise ValueError(
            "this launch trains an encoder and a decoder (--decoder-num-layers "
            f"{args.decoder_num_layers}); only GPTs and hybrid models are predicted"
        )


def _refuse_ranks(args: argparse.Namespace) -> None:
    """What the host finds when it makes its process groups, behind the arguments."""
    parts = (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        args.expert_model_parallel_size,
        args.pipeline_model_parallel_size,
    )
    size = parts[0] * parts[1] * parts[2]
    if args.world_size % size:
        raise ValueError(
            f"{args.world_size} GPUs do not divide over {size} ranks (expert tensor x expert x "
            f"pipeline parallel: {' x '.join(map(str, parts))}); Megatron ends when it makes its "
            "process groups"
        )


def model_sizes(
    args: argparse.Namespace,
    config: Any,
    *,
    vocab_size: int = 0,
    for_gpus: bool = True,
    host_layer_bytes: int | None = None,
) -> tuple[ModelSizes, list[str]]:
    """Sizes of a model on one rank, and what is to be said of them, a line each.

    Args:
        vocab_size: padded; 0 leaves logits out of account.

    Raises:
        ValueError: ranks that do not divide what is split over them.
    """
    fused = config.transformer_impl != "local"
    is_hybrid = getattr(args, "hybrid_layer_pattern", None) is not None
    ffn, remarks = _mlp_width(config)
    element = config.params_dtype.itemsize
    sizes = ModelSizes(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        hidden_size=config.hidden_size,
        ffn_hidden_size=ffn,
        num_heads=config.num_attention_heads,
        query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        latent=_latent(config),
        qk_norm=bool(config.qk_layernorm) and not config.multi_latent_attention,
        gated=config.gated_linear_unit,
        rope=getattr(args, "position_embedding_type", None) in ROTARY,
        unfused_rms_norm=not fused and not for_gpus and config.normalization == "RMSNorm",
        vocab_size=vocab_size,
        tp=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        cp=config.context_parallel_size,
        element_bytes=element,
        logit_bytes=element if getattr(args, "fp16_lm_cross_entropy", False) else 4,
        host_layer_bytes=host_layer_bytes,
    )
    if is_hybrid:
        sizes = dataclasses.replace(sizes, **_hybrid_widths(config))
    if fused and host_layer_bytes is None:
        unfused = getattr(config.attention_backend, "name", "") == "unfused"
        attention = "unfused" if unfused else "flash"
        remark = f"attention and MLP are estimated, as fused layers with {attention} attention"
        if is_hybrid:
            return dataclasses.replace(sizes, fused=attention), [*remarks, remark]
        layer = flash_layer_bytes(sizes, unfused_attention=unfused)
        sizes = dataclasses.replace(sizes, host_layer_bytes=layer)
        remarks.append(f"{remark}: measure one and give --host-layer-bytes")
    return sizes, remarks


def _hybrid_widths(config: Any) -> dict[str, Any]:
    """Of MLPs, experts and Mamba layers, each of which has its own place in the pattern."""
    heads, head_size = config.mamba_num_heads, config.mamba_head_dim
    inner = heads * head_size if heads else 2 * config.hidden_size
    return {
        "ffn_hidden_size": config.ffn_hidden_size,
        "expert_ffn_hidden_size": _over_tp(_expert_width(config), config)
        if config.num_moe_experts
        else None,
        "mamba": MambaSizes(
            inner, inner // head_size, config.mamba_state_dim, config.mamba_num_groups
        ),
    }


def _expert_width(config: Any) -> int:
    """What one token goes through in a layer of experts."""
    shared = config.moe_shared_expert_intermediate_size or 0
    return int(config.moe_router_topk * config.moe_ffn_hidden_size + shared)


def _over_tp(width: int, config: Any) -> int:
    """Experts are split over other ranks than tensor-parallel ones, evenly on average."""
    tp = config.tensor_model_parallel_size
    return int(-(-width // tp) * tp)


def _mlp_width(config: Any) -> tuple[int, list[str]]:
    """What one token goes through, as wide as the wider kind of layer."""
    dense = int(config.ffn_hidden_size)
    if not config.num_moe_experts:
        return dense, []
    width = _expert_width(config)
    remarks = [
        f"MLPs are counted as wide as what a token goes through, {width}: "
        f"top-{config.moe_router_topk} experts and shared ones, evenly loaded; dispatched tokens "
        "and the router are not counted"
    ]
    if config.moe_layer_freq not in (1, [1] * config.num_layers):
        remarks.append(
            f"moe_layer_freq = {config.moe_layer_freq}: every layer is counted as the wider kind, "
            f"with experts {width}, without {dense}"
        )
        width = max(width, dense)
    return _over_tp(width, config), remarks


def _latent(config: Any) -> LatentSizes | None:
    if not config.multi_latent_attention:
        return None
    return LatentSizes(
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        head_size=config.qk_head_dim,
        rope_size=config.qk_pos_emb_head_dim,
        value_size=config.v_head_dim,
    )


def _vocabulary(args: argparse.Namespace) -> int:
    """Padded, as the host pads it; 0 where only a tokenizer that is not here can tell."""
    from megatron.core.tokenizers.utils.build_tokenizer import (
        build_tokenizer,
        vocab_size_with_padding,
    )

    if getattr(args, "padded_vocab_size", None):
        return int(args.padded_vocab_size)
    files = [getattr(args, name, None) for name in ("tokenizer_model", "vocab_file", "merge_file")]
    given = [Path(name) for name in files if name is not None]
    if (given and all(map(Path.exists, given))) or (args.tokenizer_type or "").startswith("Null"):
        try:
            build_tokenizer(args)
            return int(args.padded_vocab_size or 0)
        except Exception:  # a library, or a file of it, is missing; the run will say which
            return 0
    return vocab_size_with_padding(args.vocab_size, args) if args.vocab_size else 0


def _host_full(config: Any) -> int:
    if (config.recompute_granularity, config.recompute_method) != ("full", "uniform"):
        return 0
    return config.recompute_num_layers or 1


def _recompute(config: Any) -> Iterator[str]:
    granularity, method = config.recompute_granularity, config.recompute_method
    if granularity == "selective":
        yield (
            f"recompute_modules = {config.recompute_modules}: what the host recomputes of these is "
            "counted as kept"
        )
    elif granularity == "full" and method != "uniform":
        yield (
            f"recompute_method = {method!r} of {config.recompute_num_layers} layers: counted as if "
            "nothing were recomputed"
        )


def _batches(reading: Reading) -> Iterator[str]:
    counts = reading.microbatches
    if len(set(counts)) > 1:
        yield (
            f"the batch changes: {', '.join(map(str, counts))} micro-batches; predicted for "
            f"{max(counts)}"
        )


def _left_out(reading: Reading) -> Iterator[str]:
    found = passed_over(reading.args, reading.config)
    if found:
        yield f"not taken into account: {', '.join(found)}"
    if reading.of_the_script:
        given = " ".join(reading.of_the_script)
        yield f"the script's own options, not taken into account: {given}"
    if reading.unknown:
        yield f"options that this Megatron does not know: {' '.join(reading.unknown)}"


def _overlap(config: Any) -> str:
    if getattr(config, "overlap_p2p_comm_warmup_flush", False):
        return "all"
    return "steady" if config.overlap_p2p_comm else "off"


def _heading(args: argparse.Namespace) -> str:
    replica = f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size}"
    if args.context_parallel_size > 1:
        replica += f" x CP {args.context_parallel_size}"
    return (
        f"{args.world_size} GPU(s), {args.data_parallel_size} replica(s) of {replica}, as "
        f"Megatron-Core {host_version()} reads the command"
    )
