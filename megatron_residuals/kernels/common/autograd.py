# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What steps of autograd have in common: rows of tokens, and functions that keep only inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional.precision import without_autocast


def rows(tensor: Tensor, ndim: int = 1) -> Tensor:
    """[..., *rest] -> [T, *rest], contiguous; ``ndim`` dimensions are the rest."""
    return tensor.reshape(-1, *tensor.shape[tensor.ndim - ndim :]).contiguous()


def wanted(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """None in the place of gradients that nobody needs."""
    pairs = zip(gradients, ctx.needs_input_grad, strict=True)
    return tuple(gradient if needed else None for gradient, needed in pairs)


class _Recomputed(torch.autograd.Function):
    """Runs the function again in backward; for functions that cost little and keep much."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], *tensors: Tensor) -> Any:
        """The function's value."""
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        with without_autocast(tensors[0]):
            return fn(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs through a second run, in its precision inside autocast too."""
        saved = ctx.saved_tensors
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(saved, ctx.needs_input_grad[1:], strict=True)
        ]
        trained = [tensor for tensor in inputs if tensor.requires_grad]
        with without_autocast(saved[0]):
            with torch.enable_grad():
                values = ctx.fn(*inputs)
            values = (values,) if isinstance(values, Tensor) else values
            pairs = zip(values, gradients, strict=True)
            # of several values, some may depend on frozen inputs alone
            roots, gradients = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
            found = iter(torch.autograd.grad(roots, trained, gradients, allow_unused=True))
        return None, *[next(found) if tensor.requires_grad else None for tensor in inputs]


def recomputed(fn: Callable[..., Any], *tensors: Tensor) -> Any:
    """``fn(*tensors)``: a tensor or a tuple of tensors, none of them an input or a view of one."""
    return _Recomputed.apply(fn, *tensors)
