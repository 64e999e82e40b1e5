# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a tensor with many readers, summed in float32.

A depth source of a 16-bit model is read by every later sublayer. Autograd would sum those gradients
in 16 bit, rounding after each. Readers that know the buffer of a source add to it instead, and the
source's own backward, which autograd runs after all of them, takes the sum out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GradientBuffer:
    """The float32 sum of what the readers of one source have sent back so far."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._backward = -1

    def add(self, gradient: Tensor) -> None:
        """Add one reader's gradient, in float32; the tensor is the buffer's from now on."""
        total = self.take()
        self._total = gradient if total is None else total.add_(gradient)
        self._backward = torch._C._current_graph_task_id()

    def take(self) -> Tensor | None:
        """The sum of this backward, leaving the buffer empty; None when no reader has sent any.

        What an earlier backward left is dropped: it ran readers and was not to reach the source.
        """
        total, self._total = self._total, None
        return total if self._backward == torch._C._current_graph_task_id() else None


class _Collect(torch.autograd.Function):
    """Identity; in backward, what is in the buffer besides what comes through autograd."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, buffer: GradientBuffer) -> Tensor:
        """The source."""
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.dtype = buffer, source.dtype
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        """Both parts, rounded once."""
        total = ctx.buffer.take()
        if total is None:
            return gradient, None
        if gradient is not None:
            total = total.add_(gradient)
        return total.to(ctx.dtype), None


def buffered(source: Tensor) -> tuple[Tensor, GradientBuffer | None]:
    """The source with a buffer for its readers, where rounding is worth avoiding.

    Sources of float32 or wider, and those without gradient, come back as they are with None.
    """
    if source.dtype.itemsize >= 4 or not (source.requires_grad and torch.is_grad_enabled()):
        return source, None
    buffer = GradientBuffer()
    return _Collect.apply(source, buffer), buffer
