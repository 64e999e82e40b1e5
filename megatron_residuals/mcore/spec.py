# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""From the specs a user has to specs whose layers carry a residual state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    _get_block_submodules,
)

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import HybridStack, stock_hybrid_stack
from megatron_residuals.mcore.layer import LAYERS, ResidualTransformerLayer, residual_layer_class

RESIDUAL = "residual"  # the parameter of a layer spec that carries the configuration
# Options with which the host builds other layers than those of its block spec.
OTHER_LAYERS = ("experimental_attention_variant",)
OTHER_DENSE_LAYERS = ("use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp")
SpecT = TypeVar("SpecT")


@dataclass
class ResidualBlockSubmodules(TransformerBlockSubmodules):
    """Layer specs of one stage and the residual that runs through them.

    A stage without layers has no layer spec to carry the configuration, hence the field.
    """

    residual: ResidualConfig = ResidualConfig()


class DeferredSpec(ModuleSpec):
    """A spec that is worked out when a block is built, from the model's own configuration.

    It stands for the layers that the host would build without ``--spec`` (dense or MoE, local or
    Transformer Engine, MLA, …). Being a ``ModuleSpec`` it is taken as it is by every supported
    version of the host, whether that version calls what ``--spec`` names or not.
    """

    def __init__(self, resolve: Callable[[], ResidualConfig]) -> None:
        super().__init__(module=ResidualTransformerLayer)
        self.resolve = resolve

    def __call__(self, *args: Any, **kwargs: Any) -> DeferredSpec:
        """Itself, for loops that call what ``--spec`` names: slime with arguments of its own."""
        return self


def replace_residual(base_spec: SpecT, residual: ResidualConfig) -> SpecT:
    """A copy of a spec, of the same kind, whose layers carry a residual state.

    Args:
        base_spec: a layer ``ModuleSpec``, ``TransformerBlockSubmodules``, the ``ModuleSpec`` of a
            ``HybridStack``, or a function that returns one of them (as Megatron >= 0.19 and Bridge
            call with the configuration).

    The residual ends behind the decoder. Multi-token prediction reads the one hidden state there,
    with layers of the host's: give the host's ``get_gpt_mtp_block_spec`` the ``base_spec``. Given
    our block spec it builds the host's layers all the same; a layer spec of ours it refuses.

    Raises:
        TypeError: the spec is of another kind, or its layers are not ``TransformerLayer``s.
    """
    if isinstance(base_spec, ModuleSpec):
        replace = _replace_stack if _is_stack(base_spec) else replace_layer
        return cast(SpecT, replace(base_spec, residual))
    if isinstance(base_spec, TransformerBlockSubmodules):
        return cast(SpecT, _replace_block(base_spec, residual))
    if callable(base_spec):

        @functools.wraps(base_spec)
        def build_spec(*args: Any, **kwargs: Any) -> Any:
            return replace_residual(base_spec(*args, **kwargs), residual)

        return cast(SpecT, build_spec)
    raise TypeError(
        f"cannot replace the residual of a {type(base_spec).__name__}; give a layer ModuleSpec, "
        "TransformerBlockSubmodules, or a function that returns one of them"
    )


def replace_layer(spec: ModuleSpec, residual: ResidualConfig) -> ModuleSpec:
    """A copy of the spec of one layer, whose sublayers read from and write to a residual state.

    Raises:
        TypeError: the layer is of a class whose sublayers we do not know.
    """
    if not isinstance(spec.module, type) or not issubclass(spec.module, LAYERS):
        raise TypeError(
            f"the layer spec builds {spec.module!r}; only TransformerLayer, MambaLayer and their "
            "subclasses have the sublayers that a residual mechanism needs"
        )
    replaced = copy.copy(spec)
    replaced.module = residual_layer_class(spec.module)  # type: ignore[arg-type]
    replaced.params = {**spec.params, RESIDUAL: residual}
    return replaced


def _replace_block(
    submodules: TransformerBlockSubmodules, residual: ResidualConfig
) -> ResidualBlockSubmodules:
    layer_specs = [replace_layer(spec, residual) for spec in submodules.layer_specs or ()]
    return ResidualBlockSubmodules(layer_specs, submodules.layer_norm, residual)


def _is_stack(spec: ModuleSpec) -> bool:
    return isinstance(spec.module, type) and issubclass(spec.module, HybridStack)


def _replace_stack(spec: ModuleSpec, residual: ResidualConfig) -> ModuleSpec:
    """The hybrid model that is built with it replaces the layers, whose stages it knows."""
    replaced = copy.copy(spec)
    replaced.params = {**spec.params, RESIDUAL: residual}
    return replaced


def stack_spec(spec: Any, config: Any) -> ModuleSpec:
    """The stack of a hybrid model, from any spec for which ``residual_of`` is true.

    Raises:
        TypeError: it is the spec of a layer.
    """
    if isinstance(spec, DeferredSpec):
        return _replace_stack(stock_hybrid_stack(config), spec.resolve())
    if not _is_stack(spec):
        raise TypeError(
            f"a hybrid model needs the spec of a HybridStack, not of {spec.module!r}; give "
            "megatron_residuals.specs.residual_spec(hybrid_stack_spec, config)"
        )
    return spec


def residual_of(spec: Any) -> bool:
    """Whether a spec asks for a block that carries a residual state."""
    if isinstance(spec, DeferredSpec | ResidualBlockSubmodules):
        return True
    return isinstance(spec, ModuleSpec) and RESIDUAL in spec.params


def block_submodules(
    spec: Any, config: Any, vp_stage: int | None, groups: Any
) -> ResidualBlockSubmodules:
    """The layers of one stage, from any spec for which ``residual_of`` is true."""
    if isinstance(spec, ResidualBlockSubmodules):
        return spec
    pp_rank = groups.pp.rank() if groups is not None and hasattr(groups, "pp") else None
    if isinstance(spec, DeferredSpec):
        return _replace_block(_stock_block(config, vp_stage, pp_rank), spec.resolve())
    stock = _get_block_submodules(config, spec, vp_stage, pp_rank)
    return ResidualBlockSubmodules(stock.layer_specs, stock.layer_norm, spec.params[RESIDUAL])


def check_layers(config: Any) -> None:
    """Refuse a configuration for which the host's GPT builder takes other layers than we would.

    Raises:
        ValueError: naming the option.
    """
    for name in OTHER_LAYERS if config.num_moe_experts else OTHER_LAYERS + OTHER_DENSE_LAYERS:
        value = getattr(config, name, None)
        if value:
            raise ValueError(
                f"{name} = {value!r} has layer specs of its own; build them and pass them through "
                "megatron_residuals.specs.residual_spec(base_spec, config)"
            )


def _stock_block(
    config: Any, vp_stage: int | None, pp_rank: int | None
) -> TransformerBlockSubmodules:
    """What the host's GPT builder would take for this configuration."""
    check_layers(config)
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
