# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""16-bit training: activations are 16 bit, the mechanism's parameters and coefficients are not."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.module import Float16Module

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import keep_residual_init, spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    build_chunks,
    micro_batches,
    setup_parallel,
)

pytestmark = pytest.mark.host

MECHANISMS = ["hc()", "mhc()", "mhc(mhc_convention='dsv4')", "attnres()", "block_attnres()"]


def dtypes_after_a_step(toy: ToyGPT, residual: str) -> dict[str, set[torch.dtype]]:
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec_for(residual), initialise=keep_residual_init)
    # build_chunks casts the whole model to the toy's dtype first, as `params_dtype` would
    model = Float16Module(chunk.config, chunk)
    batch = next(micro_batches(toy))
    model(batch["tokens"], batch["positions"], batch["mask"]).float().square().mean().backward()
    found: dict[str, set[torch.dtype]] = {"mechanism": set(), "host": set(), "gradients": set()}
    for name, parameter in chunk.named_parameters():
        ours = "_residual." in name or "residual_head" in name
        found["mechanism" if ours else "host"].add(parameter.dtype)
        if ours:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
            found["gradients"].add(parameter.grad.dtype)
    return found


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("residual", MECHANISMS)
def test_parameters_and_gradients_of_the_mechanism_stay_float32(
    residual: str, half: torch.dtype
) -> None:
    precision = dict(bf16=True) if half is torch.bfloat16 else dict(fp16=True)
    toy = ToyGPT(num_layers=2, dtype=half, config_overrides=precision)
    (found,) = run_ranks(1, dtypes_after_a_step, toy, residual)
    assert found == {
        "mechanism": {torch.float32},
        "host": {half},
        "gradients": {torch.float32},
    }
