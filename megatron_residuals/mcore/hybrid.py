# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The stack of a hybrid model, whose layers are one sublayer each, with a residual state."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.block import ResidualBlockMixin
from megatron_residuals.mcore.compat import HybridStack, host_version, stage_layout
from megatron_residuals.mcore.spec import replace_layer, residual_of, stack_spec
from megatron_residuals.mcore.support import check_model
from megatron_residuals.pipeline.pattern import KINDS


class ResidualStackMixin(ResidualBlockMixin):
    """Turns a host's ``HybridStack`` class into one with a residual state.

    Layers of multi-token prediction stand in a stack of their own, which stays the host's.

    Args:
        residual: what replaces the residual connection.
        pattern: of the whole model.
        vp_stage: virtual chunk of the stack on its rank.

    Raises:
        ValueError: the model uses something that a replaced residual does not support.
    """

    final_norm_name = "final_norm"

    def __init__(
        self,
        config: Any,
        submodules: Any,
        *args: Any,
        residual: ResidualConfig,
        pattern: str,
        vp_stage: int | None,
        **kwargs: Any,
    ) -> None:
        layout = stage_layout(config, kwargs["pg_collection"].pp.size(), pattern)
        fields = [f"{KINDS[symbol]}_layer" for symbol in dict.fromkeys(kwargs["layer_type_list"])]
        specs = {field: _layer_spec(submodules, field) for field in fields}
        check_model(config, list(specs.values()), residual, whole_layers=False)
        submodules = copy.copy(submodules)
        for field, spec in specs.items():
            setattr(submodules, field, replace_layer(spec, residual))
        super().__init__(config, submodules, *args, **kwargs)  # type: ignore[call-arg]
        self._build_residual(residual, layout, vp_stage)


def _layer_spec(submodules: Any, field: str) -> ModuleSpec:
    spec = getattr(submodules, field, None)
    if not isinstance(spec, ModuleSpec):
        raise ValueError(f"the pattern has layers of which the stack's spec has no {field}")
    return spec


@functools.cache
def residual_stack_class(base: type[HybridStack]) -> type[HybridStack]:
    """The residual form of a host stack class, one class for each base."""
    return type(f"Residual{base.__name__}", (ResidualStackMixin, base), {"__doc__": base.__doc__})


def with_residual_stack(arguments: inspect.BoundArguments) -> bool:
    """Have the arguments of a hybrid model build its stack with the residual that they ask for.

    Returns:
        Whether they ask for one.

    Raises:
        ValueError: this host cuts hybrid models in a way that no layout describes, or the layers
            are given by their shares of the whole.
    """
    given = arguments.arguments
    _, config, name, *_ = arguments.signature.parameters
    if not residual_of(given[name]):
        return False
    if "vp_stage" not in arguments.signature.parameters:
        raise ValueError(
            f"the hybrid models of megatron-core {host_version()} have no stages in their pattern, "
            "so a residual cannot be carried through them; use megatron-core 0.17 or newer"
        )
    pattern = given.get("hybrid_layer_pattern") or given.get("hybrid_override_pattern")
    if not pattern:
        raise ValueError(
            "a hybrid model with a residual needs its layers one by one: give "
            "--hybrid-layer-pattern (hybrid_layer_pattern=) in place of ratios"
        )
    spec = copy.copy(stack_spec(given[name], given[config]))
    spec.module = residual_stack_class(spec.module)
    spec.params = {**spec.params, "pattern": pattern, "vp_stage": given.get("vp_stage")}
    given[name] = spec
    return True


def hybrid_model(stock: Callable[..., None], finish: Callable[[Any], Any]) -> Callable[..., None]:
    """``HybridModel.__init__`` whose decoder carries a residual where its spec asks for one.

    ``finish`` takes the decoder of a model that has been built with one.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs)
        has_residual = with_residual_stack(arguments)
        stock(*arguments.args, **arguments.kwargs)
        if has_residual:
            finish(self.decoder)

    return __init__
