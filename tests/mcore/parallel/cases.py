# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: mechanisms, specs of any model kind, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.install import install
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.testing import assert_close
from megatron_residuals.testing.tolerances import Kind
from megatron_residuals.testing.toy_gpt import ToyResult
from megatron_residuals.testing.toy_training import Trained

MHC, MHC_DSV4 = "mhc(streams=3)", "mhc(streams=2, mhc_convention='dsv4')"
BLOCKS, FULL = "block_attnres(block_sublayers=3)", "attnres()"
HC = "hc(streams=2)"
# A residual that is no residual: the same tests for it tell faults of the toy from ours.
PLAIN = "residual()"

# Small, with every size different from every other: a transposed or mixed-up axis shows.
SMALL: dict[str, Any] = dict(num_layers=3, hidden_size=16, seq_length=8, micro_batch_size=2)
FLOAT64: dict[str, Any] = dict(SMALL, dtype=torch.float64)


def block_spec_for(
    residual: str | None, change: Callable[[Any], None] | None = None
) -> Callable[[Any, int | None], Any]:
    """The host's local layers of whatever kind the configuration asks for, with a residual.

    Args:
        residual: text of the residual, or None for the stock model.
        change: applied to every layer spec of the host first.
    """
    install()

    def spec(config: Any, vp_stage: int | None) -> Any:
        base = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            vp_stage=vp_stage,
        )
        for layer in base.layer_specs if change is not None else ():
            change(layer)
        return base if residual is None else replace_residual(base, ResidualConfig.parse(residual))

    return spec


def assert_same(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
    kind: Kind = "same_math",
) -> None:
    """Two sets of tensors by name: the same names, close values."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, dtype=dtype, kind=kind, name=name)


def assert_same_step(
    actual: Trained,
    expected: ToyResult | Trained,
    dtype: torch.dtype = torch.float64,
    kind: Kind = "same_math",
) -> None:
    """Losses and gradients of the first step."""
    first = expected.losses if isinstance(expected, ToyResult) else expected.losses[0]
    losses = [torch.tensor(values, dtype=torch.float64) for values in (actual.losses[0], first)]
    assert_close(*losses, dtype=dtype, kind=kind, name="losses")
    assert_same(actual.grads, expected.grads, dtype, kind)


def is_mechanism(name: str) -> bool:
    """Whether a global parameter name is one of a residual mechanism."""
    return "_residual." in name or ".residual_head." in name


def assert_mechanism_trains(grads: dict[str, torch.Tensor]) -> None:
    """Guards comparisons against comparing zeros; the first AttnRes read has a zero gradient."""
    ours = {name: grad for name, grad in grads.items() if is_mechanism(name)}
    assert ours
    for name, grad in ours.items():
        trivial = "layers.0.self_attention_residual." in name and name.endswith(("query", "gain"))
        assert (grad.abs().max() > 0) != trivial, name
