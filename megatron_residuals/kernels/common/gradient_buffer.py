# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a tensor with many readers, summed in place, in float32 or wider.

A depth source is read by every later sublayer. Autograd would write each of those gradients out and
sum them in the source's own dtype, in 16 bit rounding after each. Readers that know the buffer of a
source add to it instead, and the source's own backward, which autograd runs after all of them,
takes the sum out. Readers are added one by one, the last first, however many of them share a pass:
so a pipeline stage that ends between two of them does not change the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GradientBuffer:
    """The sum of what the readers of one source have sent back so far, float32 or wider."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._backward = -1

    def accumulator(self, source: Tensor) -> Tensor:
        """The sum itself [..., d], for readers to add to in place; zero at first."""
        total = self.take()
        if total is None:
            dtype = torch.promote_types(source.dtype, torch.float32)
            memory_format = torch.contiguous_format
            total = torch.zeros_like(source, dtype=dtype, memory_format=memory_format)
        self._total, self._backward = total, torch._C._current_graph_task_id()
        return total

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


class _Deposit(torch.autograd.Function):
    """Identity; in backward, the gradient goes into the buffer."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, buffer: GradientBuffer) -> Tensor:
        """The source."""
        ctx.set_materialize_grads(False)
        ctx.buffer = buffer
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        """Added to what later readers have left there."""
        if gradient is not None:
            ctx.buffer.accumulator(gradient).add_(gradient)
        return None, None


def buffered(source: Tensor) -> tuple[Tensor, GradientBuffer | None]:
    """The source with a buffer for its readers; itself and None where it gets no gradient.

    Nor is there one in what a compiler traces, where sums are the graph's own.
    """
    if torch.compiler.is_compiling() or not (source.requires_grad and torch.is_grad_enabled()):
        return source, None
    buffer = GradientBuffer()
    return _Collect.apply(source, buffer), buffer


def depositing(source: Tensor, buffer: GradientBuffer | None) -> Tensor:
    """The source for a reader that does not know its buffer, as the payload of a pipeline stage.

    What comes back through autograd is added in its turn, before that of earlier readers.
    """
    return source if buffer is None else _Deposit.apply(source, buffer)
