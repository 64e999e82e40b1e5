# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The toy GPT with its residual connection replaced.

Call ``megatron_residuals.testing.install()`` before importing this: it imports Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import stock_hybrid_stack
from megatron_residuals.mcore.install import install
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.testing.toy_gpt import ToyGPT
from megatron_residuals.testing.toy_weights import default_initialise


def spec_for(residual: str | ResidualConfig) -> Callable[[Any, int | None], Any]:
    """A spec function for ``run_toy``: the host's local layers with a residual (config or text)."""
    config = ResidualConfig.parse(residual) if isinstance(residual, str) else residual
    install()

    def spec(transformer_config: Any, vp_stage: int | None) -> Any:
        base = get_gpt_layer_local_spec(normalization=transformer_config.normalization)
        return replace_residual(base, config)

    return spec


def stack_for(residual: str | ResidualConfig) -> Callable[[Any, int | None], Any]:
    """The same for a toy with a ``pattern``: the host's hybrid stack with a residual."""
    config = ResidualConfig.parse(residual) if isinstance(residual, str) else residual
    install()

    def spec(transformer_config: Any, vp_stage: int | None) -> Any:
        return replace_residual(stock_hybrid_stack(transformer_config), config)

    return spec


def toy_spec(toy: ToyGPT, residual: str | ResidualConfig) -> Callable[[Any, int | None], Any]:
    """The spec function for a toy, a GPT or a hybrid model."""
    return (spec_for if toy.pattern is None else stack_for)(residual)


def keep_residual_init(
    name: str, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor | None:
    """Random weights for the host's parameters; the mechanism's keep their own initial values."""
    if "_residual." in name or "residual_head" in name:
        return None
    return default_initialise(name, shape, generator)
