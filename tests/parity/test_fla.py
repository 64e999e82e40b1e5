# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""AttnRes reads against the reference of flash-linear-attention."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.testing import assert_close

HIDDEN, TOKENS = 20, 6


def naive_attnres() -> Any:
    """The reference, a plain torch function; importing it needs triton, but no GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("fla.ops.attnres.naive").naive_attnres
    except (ImportError, RuntimeError) as error:  # it looks for a driver of some accelerator
        pytest.skip(f"no flash-linear-attention with AttnRes is installed ({error})")


@pytest.mark.parametrize("read", [functional.read_sources, kernels.read_sources])
@pytest.mark.parametrize("num_sources", [1, 2, 9])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_a_read_computes_what_fla_computes_forward_and_backward(
    read: Callable[..., Tensor], num_sources: int, eps: float
) -> None:
    reference = naive_attnres()
    generator = torch.Generator().manual_seed(num_sources)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    sources = [draw(TOKENS, 2, HIDDEN) for _ in range(num_sources)]
    query, gain = draw(HIDDEN), draw(HIDDEN)
    inputs = [query, gain, *sources]
    cotangent = torch.randn(TOKENS, 2, HIDDEN, generator=generator)
    mine = read(sources, query, gain, eps=eps)
    theirs = reference(query, sources, gain, rms_eps=eps)
    assert_close(mine, theirs, dtype=torch.float32, kind="reordered", name="read")
    grads = torch.autograd.grad(mine, inputs, cotangent, allow_unused=True)
    expected = torch.autograd.grad(theirs, inputs, cotangent)
    for index, (own, gradient) in enumerate(zip(grads, expected, strict=True)):
        own = torch.zeros_like(gradient) if own is None else own
        assert_close(own, gradient, dtype=torch.float32, kind="reordered", name=f"input {index}")
    if num_sources > 1:
        assert expected[0].abs().max() > 1e-2
