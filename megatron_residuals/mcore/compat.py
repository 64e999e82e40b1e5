# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between supported Megatron-Core releases, in one place."""

from __future__ import annotations

import importlib.util
import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import megatron.core
from megatron.core.models.mamba.mamba_layer_specs import (
    mamba_inference_stack_spec,
    mamba_stack_spec,
)
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from packaging.version import Version

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.pattern import pattern_layout
from megatron_residuals.versions import OLDEST, UNTESTED

HOST = "megatron-core"
OLDEST_HOST, NEWEST_HOST = Version(OLDEST[HOST]), Version(UNTESTED[HOST])  # newest is excluded
HybridStack = MambaStack  # as all releases call it, and as it is called from 0.18 on
HYBRID_MODEL = (
    "megatron.core.models.hybrid.hybrid_model.HybridModel"
    if importlib.util.find_spec("megatron.core.models.hybrid")
    else "megatron.core.models.mamba.mamba_model.MambaModel"  # its name up to 0.17
)
ALLOW_UNTESTED = "MEGATRON_RESIDUALS_ALLOW_UNTESTED_HOST"


def host_version() -> Version:
    """Version of the Megatron-Core that is imported."""
    return Version(megatron.core.__version__)


def check_host_version() -> None:
    """Refuse a Megatron-Core outside the tested window.

    Raises:
        RuntimeError: naming the version found, the window and the override.
    """
    found = host_version()
    if OLDEST_HOST <= found < NEWEST_HOST or os.environ.get(ALLOW_UNTESTED) == "1":
        return
    raise RuntimeError(
        f"megatron-core {found} is outside the tested window [{OLDEST_HOST}, {NEWEST_HOST}). "
        f"Install a version inside it, or set {ALLOW_UNTESTED}=1 to try at your own risk."
    )


def stock_hybrid_stack(config: Any) -> Any:
    """The spec of the stack that the host's hybrid scripts build without ``--spec``."""
    is_inference = config.transformer_impl == "inference_optimized"
    return mamba_inference_stack_spec if is_inference else mamba_stack_spec


def stage_layout(config: Any, num_ranks: int, pattern: str | None = None) -> StageLayout:
    """Layers of every pipeline stage, asked from the host for all ranks and chunks.

    Those of a hybrid model stand in its ``pattern``.
    """
    if pattern is not None:
        return pattern_layout(
            pattern,
            num_ranks,
            first=config.num_layers_in_first_pipeline_stage,
            last=config.num_layers_in_last_pipeline_stage,
        )
    num_chunks = (config.virtual_pipeline_model_parallel_size or 1) if num_ranks > 1 else 1
    custom = getattr(config, "pipeline_model_parallel_layout", None)
    layers = []
    for chunk in range(num_chunks):
        for rank in range(num_ranks):
            if custom is not None:
                layers.append(custom.layout[rank][chunk].count(LayerType.decoder))
            else:
                vp_stage = chunk if num_chunks > 1 else None
                layers.append(get_num_layers_to_build(config, vp_stage, rank))
    return StageLayout(num_ranks, num_chunks, tuple(layers))


_MLP_ARGUMENTS = frozenset(inspect.signature(TransformerLayer._forward_mlp).parameters)


def mlp_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of a layer's keyword arguments that this host's ``_forward_mlp`` takes."""
    names = ("inference_context", "padding_mask", "packed_seq_params")
    return {name: arguments[name] for name in names if name in _MLP_ARGUMENTS and name in arguments}


def mixer_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The part of a layer's keyword arguments that a Mamba layer takes."""
    names = ("attention_mask", "inference_context", "packed_seq_params")
    return {name: arguments[name] for name in names if name in arguments}


_SAYS_WHAT_PREDICTS = "is_mtp_layer" in inspect.signature(TransformerLayer).parameters


def is_prediction_layer(*args: Any, **arguments: Any) -> bool:
    """Whether the host builds a layer with these arguments for multi-token prediction.

    It says so from 0.17 on. Before, it numbers those layers behind the last layer of the decoder.
    """
    if _SAYS_WHAT_PREDICTS:
        return bool(arguments.get("is_mtp_layer"))
    config = args[0] if args else arguments["config"]
    if not getattr(config, "mtp_num_layers", None) or "layer_number" not in arguments:
        return False
    offset = get_transformer_layer_offset(config, arguments.get("vp_stage"))
    return bool(arguments["layer_number"] + offset > config.num_layers)


def prediction_can_be_recomputed() -> bool:
    """Whether the host's multi-token prediction runs under its full recompute.

    In 0.18 it hands its checkpoint an argument that the checkpoint does not take.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as Layer

    taken = inspect.signature(Layer._checkpointed_forward).parameters
    given = inspect.signature(Layer.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    return takes_all or "padding_mask" in taken or "padding_mask" not in given


def is_quantized(config: Any) -> bool:
    """Whether linear layers compute in fp8 or fp4."""
    return bool(config.fp8 or getattr(config, "fp4", None))


def keep_attention_input(attention: Any) -> None:
    """Have a quantized attention keep its input itself, not a copy of it.

    Raises:
        ValueError: the installed Transformer Engine cannot (older than 2.6).
    """
    attention.set_for_recompute_input_layernorm()


def keep_mlp_input(mlp: Any) -> None:
    """Have a quantized MLP or MoE layer keep its input itself, not a copy of it.

    Raises:
        ValueError: the installed Transformer Engine cannot (older than 2.6).
    """
    if hasattr(mlp, "set_for_recompute_pre_mlp_layernorm"):
        mlp.set_for_recompute_pre_mlp_layernorm()
        return
    from megatron.core.extensions.transformer_engine import set_save_original_input

    set_save_original_input(mlp.linear_fc1)


def outer_quantization_context(config: Any) -> AbstractContextManager[Any]:
    """The context around all layers of a stage: fp8 with delayed scaling, otherwise nothing."""
    if config.fp8 and config.fp8_recipe == "delayed":
        from megatron.core.fp8_utils import get_fp8_context

        outer: AbstractContextManager[Any] = get_fp8_context(config)
        return outer
    return nullcontext()


def layer_quantization_context(config: Any, layer_index: int) -> AbstractContextManager[Any]:
    """The context around one layer (0-based global index): fp8 without delayed scaling, or fp4."""
    if config.fp8 and config.fp8_recipe != "delayed":
        from megatron.core.fp8_utils import get_fp8_context

        fp8: AbstractContextManager[Any] = get_fp8_context(config, layer_index)
        return fp8
    if getattr(config, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_context

        fp4: AbstractContextManager[Any] = get_fp4_context(config, layer_index)
        return fp4
    return nullcontext()


def norms_can_be_discarded() -> bool:
    """Whether the host's ``CheckpointWithoutOutput()`` works here.

    Without Transformer Engine it takes its own default, ``fp8=False``, for "fp8 is on" and fails.
    """
    from megatron.core.tensor_parallel import random

    return random.HAVE_TE or not random.CheckpointWithoutOutput().fp8
