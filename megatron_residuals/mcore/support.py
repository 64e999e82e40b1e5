# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What cannot be combined with a replaced residual yet, refused when the model is built."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp

from megatron_residuals.config import ResidualConfig
from megatron_residuals.kernels.common import libraries
from megatron_residuals.mcore.arguments import global_args
from megatron_residuals.mcore.compat import (
    is_quantized,
    norms_can_be_discarded,
    prediction_can_be_recomputed,
)
from megatron_residuals.text import fault_list

OFF: tuple[object, ...] = (None, False, 0, "none", [], ())


class Refusal(NamedTuple):
    """A host option that is refused when it is on, and what to do instead."""

    option: str
    advice: str


REFUSALS = (
    Refusal(
        "mtp_standalone",
        "multi-token prediction in a stage in front of the last one sends a payload that the plan "
        "does not know; put every m of the pipeline layout into the last stage, in front of L",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "its schedule runs layers without the block; drop --overlap-moe-expert-parallel-comm",
    ),
    Refusal("cuda_graph_impl", "CUDA graphs are not supported; set --cuda-graph-impl none"),
    Refusal("enable_cuda_graph", "CUDA graphs are not supported; drop --enable-cuda-graph"),
    Refusal("external_cuda_graph", "CUDA graphs are not supported; drop --external-cuda-graph"),
    Refusal("cpu_offloading", "activation offloading is not supported; drop --cpu-offloading"),
    Refusal(
        "fine_grained_activation_offloading",
        "activation offloading is not supported; drop --fine-grained-activation-offloading",
    ),
    Refusal(
        "apply_residual_connection_post_layernorm",
        "mechanisms are defined for pre-norm layers; drop "
        "--apply-residual-connection-post-layernorm",
    ),
    Refusal(
        "fused_residual_rmsnorm",
        "the norm must not own the residual; drop --fused-residual-rmsnorm",
    ),
    Refusal(
        "inference_fuse_tp_communication",
        "it adds the residual inside a kernel; turn it off",
    ),
    Refusal(
        "heterogeneous_block_specs",
        "layers without attention or MLP are not supported; drop the file of "
        "--heterogeneous-layers-config-path",
    ),
    Refusal("use_ring_exchange_p2p", "use point-to-point communication of torch.distributed"),
    Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        "partial activation checkpoints are not supported; use --residual-recompute",
    ),
    Refusal("enable_mhc_connections", "the host's own mHC is on; use one of the two"),
    Refusal("enable_hyper_connections", "the host's own mHC is on; use one of the two"),
    Refusal("enable_attention_residuals", "the host's own AttnRes is on; use one of the two"),
    Refusal("wide_residual", "the host's own wide residual is on; use one of the two"),
)

# What the training loop alone knows. A mechanism's float32 parameters lie beside 16-bit ones, and
# some are read ahead of their layer: sharded by layer, the first step fails.
_FSDP = "parameters of a mechanism cannot be sharded by layer; use --use-distributed-optimizer"
TRAINING_REFUSALS = (
    Refusal("use_torch_fsdp2", _FSDP),
    Refusal("use_megatron_fsdp", _FSDP),
    Refusal(
        "yaml_cfg",
        "the file takes the place of all arguments, those of the residual too; drop --yaml-cfg and "
        "give Megatron's flags",
    ),
    Refusal(
        "use_layer_wise_distributed_optimizer",
        "it gathers parameters of one dtype, and a mechanism's are float32 beside 16-bit ones; "
        "give --optimizer muon without --use-distributed-optimizer",
    ),
    Refusal(
        "use_precision_aware_optimizer",
        "its state for float32 beside 16-bit parameters was never tried (it needs Transformer "
        "Engine's Adam on a GPU); drop --use-precision-aware-optimizer",
    ),
)


def check_options(config: Any, args: argparse.Namespace, residual: ResidualConfig) -> None:
    """Refuse a launch that `check_model` would refuse, by its options alone.

    What the machine that trains must have installed is not looked for: this may be another one.

    Args:
        args: of Megatron's training loop.

    Raises:
        ValueError: listing every refused option with its value and what to do.
    """
    faults = [*_option_faults(config, args), *_recompute_faults(config, residual)]
    _refuse([*faults, *host_faults(config)])


def check_model(
    config: Any,
    layer_specs: Sequence[Any],
    residual: ResidualConfig,
    *,
    whole_layers: bool = True,
) -> None:
    """Refuse a model that would run wrong.

    Args:
        config: the host's ``TransformerConfig``.
        layer_specs: the specs of the layers of this stage, before they are built.
        residual: what replaces the residual connection.
        whole_layers: whether every layer must have both an attention and an MLP.

    Raises:
        ValueError: listing every refused option with its value and what to do.
    """
    faults = _option_faults(config, global_args())
    faults.extend(_kernel_faults(config, residual))
    faults.extend(_recompute_faults(config, residual))
    faults.extend(_quantized_norm_faults(config, layer_specs, residual))
    faults.extend(host_faults(config))
    whole = ("self_attention", "mlp") if whole_layers else ()
    faults.extend(sorted({fault for spec in layer_specs for fault in _layer_faults(spec, whole)}))
    _refuse(faults)


def _option_faults(config: Any, args: argparse.Namespace | None) -> list[str]:
    return [
        f"{option} = {getattr(holder, option)!r}: {advice}"
        for holder, refusals in ((config, REFUSALS), (args, TRAINING_REFUSALS))
        for option, advice in refusals
        if getattr(holder, option, None) not in OFF
    ]


def _refuse(faults: list[str]) -> None:
    if faults:
        raise ValueError(
            fault_list("this model cannot run with a replaced residual connection", faults)
        )


def host_warnings(config: Any) -> list[str]:
    """What works in training but not in every pass, by the host's own doing; a line each."""
    largest = config.microbatch_group_size_per_vp_stage or 0
    drops_sends = (
        config.virtual_pipeline_model_parallel_size is not None
        and getattr(config, "overlap_p2p_comm_warmup_flush", False)
        and not config.deallocate_pipeline_outputs
        and largest > config.pipeline_model_parallel_size
    )
    if not (drops_sends and dist.is_initialized() and dist.get_backend() == "gloo"):
        return []
    return [
        "forward-only passes may wait for ever: with overlap_p2p_comm_warmup_flush, and "
        f"microbatch_group_size_per_vp_stage = {largest} above the "
        f"{config.pipeline_model_parallel_size} pipeline ranks, the host forgets its last send, "
        "which gloo then drops; set deallocate_pipeline_outputs = True (Megatron's training loop "
        "does)"
    ]


def host_faults(config: Any) -> list[str]:
    """What ends in the host without a word of the reason, with the stock residual too."""
    faults = []
    recomputes_mlp = config.recompute_granularity == "selective" and "mlp" in (
        config.recompute_modules or ()
    )
    if recomputes_mlp and config.add_bias_linear and _has_dense_layers(config):
        if not is_quantized(config):  # another checkpoint function does it then
            faults.append(
                "recompute_modules = 'mlp' with add_bias_linear = True: the host's checkpoint "
                "returns the bias of the MLP, whose gradient then leads back to the checkpoint, "
                "and backward never ends; add --disable-bias-linear, or recompute by "
                "--residual-recompute"
            )
    if (
        config.fp32_residual_connection
        and config.pipeline_model_parallel_size > 1
        and config.pipeline_dtype != torch.float32
    ):
        faults.append(
            f"fp32_residual_connection = True with pipeline_dtype = {config.pipeline_dtype}: this "
            "Megatron-Core receives in 16 bit what is sent in float32; set "
            "pipeline_dtype = torch.float32 in the TransformerConfig"
        )
    if (
        config.pipeline_model_parallel_size == 2
        and config.virtual_pipeline_model_parallel_size is not None
        and config.num_layers_in_first_pipeline_stage is not None
        and config.num_layers_in_last_pipeline_stage is not None
    ):
        faults.append(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage with two "
            "pipeline ranks and virtual stages: the host numbers layers by dividing by the ranks "
            "between the two, of which there is none; give one of the counts, or "
            "--pipeline-model-parallel-layout"
        )
    return faults


def _has_dense_layers(config: Any) -> bool:
    experts_in = config.moe_layer_freq
    if not config.num_moe_experts:
        return True
    return experts_in != 1 if isinstance(experts_in, int) else 0 in experts_in


def _kernel_faults(config: Any, residual: ResidualConfig) -> list[str]:
    """What is known of external libraries before they are tried."""
    kernels = residual.kernels
    if kernels not in libraries.LIBRARIES or residual.entry.is_stock:
        return []
    faults = [libraries.fault(kernels, config.params_dtype), residual.entry.kernel_fault(residual)]
    return [f"--residual-kernels {kernels}: {fault}" for fault in faults if fault]


def _recompute_faults(config: Any, residual: ResidualConfig) -> list[str]:
    ours, faults = residual.recompute, []
    if config.recompute_granularity == "full" and ours != "none":
        faults.append(
            f"recompute_granularity = 'full' with --residual-recompute {ours}: both would replay "
            "the same layers; use one of the two"
        )
    predicts = getattr(config, "mtp_num_layers", None)
    if config.recompute_granularity == "full" and predicts and not prediction_can_be_recomputed():
        faults.append(
            "recompute_granularity = 'full' with mtp_num_layers: multi-token prediction of this "
            "Megatron-Core fails under its own full recompute; use --residual-recompute"
        )
    checkpoints = config.recompute_granularity == "full" or ours.startswith("block")
    if checkpoints and config.distribute_saved_activations:
        faults.append(
            "distribute_saved_activations = True: a source that several layers read cannot be cut; "
            "drop --distribute-saved-activations"
        )
    if residual.recompute_policy in ("mix", "group") and not norms_can_be_discarded():
        faults.append(
            f"--residual-recompute {ours}: without Transformer Engine this Megatron's "
            "CheckpointWithoutOutput, which recomputes the norms, fails; install it or use none"
        )
    return faults


def _quantized_norm_faults(
    config: Any, layer_specs: Sequence[Any], residual: ResidualConfig
) -> list[str]:
    """The host recomputes no norm under delayed scaling, whose history a replay would repeat."""
    discards = residual.recompute_policy in ("mix", "group")
    delayed = config.fp8 and config.fp8_recipe == "delayed"
    if not (discards and delayed and any(map(_has_own_norm, layer_specs))):
        return []
    return [
        f"--residual-recompute {residual.recompute} with fp8_recipe = 'delayed': norms that are "
        "not fused into the linear layer behind them cannot be recomputed under delayed scaling; "
        "use another fp8 recipe, or --residual-recompute none"
    ]


def _has_own_norm(spec: Any) -> bool:
    return _has(spec, "input_layernorm") or _has(spec, "pre_mlp_layernorm")


def _layer_faults(spec: Any, needed: Sequence[str]) -> list[str]:
    faults = []
    if _has(spec, "cross_attention"):
        faults.append("a layer has cross-attention: only decoder-only layers are supported")
    for name in needed:
        if not _has(spec, name):
            faults.append(f"a layer has no {name}: layers need both an attention and an MLP")
    return faults


def _has(spec: Any, name: str) -> bool:
    """Whether the spec of a layer has a module of that name."""
    module = getattr(spec.submodules, name, IdentityOp)
    return getattr(module, "module", module) is not IdentityOp
