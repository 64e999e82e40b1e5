# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The steps of autograd that read depth sources, around any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import ClosedRead, SourceScores, direction_of
from megatron_residuals.functional.precision import without_autocast
from megatron_residuals.kernels.common.autograd import rows
from megatron_residuals.kernels.common.dispatch import Backend
from megatron_residuals.kernels.common.gradient_buffer import GradientBuffer
from megatron_residuals.kernels.depth_attention import pytorch
from megatron_residuals.kernels.depth_attention.contract import DepthBackend, Merged

GradientBuffers = Sequence[GradientBuffer | None]


class ReadSources(torch.autograd.Function):
    """x = sum_j softmax_j(rstd_j dot_j) V_j with dot_j = <V_j, q o gain>, rstd_j = 1 / rms(V_j).

    Saved besides the inputs: dot and rstd, two numbers per source and token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: Backend,
        eps: float,
        buffers: GradientBuffers,
        query: Tensor,
        key_gain: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        """The weighted sum."""
        direction = direction_of(query, key_gain, sources[0])
        with without_autocast(direction):
            x, scores = _backend(name).read_sources(_all_rows(sources), direction, eps)
        ctx.name, ctx.buffers = name, buffers
        ctx.save_for_backward(query, key_gain, *scores, *sources)
        return x.view(sources[0].shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """One pass over the sources."""
        query, key_gain, dots, rstd, *sources = ctx.saved_tensors
        flat, direction = _all_rows(sources), direction_of(query, key_gain, sources[0])
        needed = ctx.needs_input_grad[5:]
        sums = _sums(sources, ctx.buffers, needed)
        fresh = [
            torch.empty_like(source) if want and total is None else None
            for source, total, want in zip(flat, sums, needed, strict=True)
        ]
        with without_autocast(gradient):
            d_direction = _backend(ctx.name).read_sources_backward(
                rows(gradient), flat, direction, SourceScores(dots, rstd), sums, fresh
            )
        d_query = (d_direction * key_gain).to(query.dtype)
        d_gain = (d_direction * query).to(key_gain.dtype)
        return None, None, None, d_query, d_gain, *_shaped(fresh, sources)


class ReadClosed(torch.autograd.Function):
    """S readers of the same m sources: their values [..., d], then their lse [...].

    Saved besides the inputs: S m dots and m rstd per token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: Backend,
        eps: float,
        buffers: GradientBuffers,
        directions: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        """One pass over the sources for all readers."""
        ctx.set_materialize_grads(False)
        shape = sources[0].shape
        with without_autocast(directions):
            values, lses, scores = _backend(name).read_closed(_all_rows(sources), directions, eps)
        ctx.name, ctx.buffers = name, buffers
        ctx.save_for_backward(directions, *scores, *sources)
        # one storage each, as outputs must not be views of one tensor
        split = [each.clone().view(shape[:-1]) for each in lses]
        return *[each.view(shape) for each in values], *split

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """All readers' gradients in one pass over the sources."""
        directions, dots, rstd, *sources = ctx.saved_tensors
        size, flat, needed = len(directions), _all_rows(sources), ctx.needs_input_grad[4:]
        totals = _sums(sources, ctx.buffers, needed)
        fresh = [
            torch.zeros_like(source, dtype=directions.dtype) if want and total is None else None
            for source, total, want in zip(flat, totals, needed, strict=True)
        ]
        pairs = zip(fresh, totals, strict=True)
        with without_autocast(directions):
            d_directions = _backend(ctx.name).read_closed_backward(
                [None if each is None else rows(each) for each in gradients[:size]],
                [None if each is None else rows(each, 0) for each in gradients[size:]],
                flat,
                directions,
                SourceScores(dots, rstd),
                [total if new is None else new for new, total in pairs],
            )
        narrowed = [None if new is None else new.to(sources[0].dtype) for new in fresh]
        return None, None, None, d_directions, *_shaped(narrowed, sources)


class MergeRunning(torch.autograd.Function):
    """x, and with an output to be added the running sum behind it.

    Saved: x, the running sum, and of it dot, rstd and weight, three numbers per token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: Backend,
        eps: float,
        values: Tensor,
        lse: Tensor,
        direction: Tensor,
        partial: Tensor,
        output: Tensor | None,
    ) -> Any:
        """Add, score, merge."""
        ctx.set_materialize_grads(False)
        shape, added = partial.shape, None if output is None else rows(output)
        read = ClosedRead(rows(values), rows(lse, 0), direction)
        with without_autocast(direction):
            merged = _backend(name).merge_running(read, rows(partial), added, eps)
        x, total = merged.x.view(shape), partial
        if output is not None:
            total = merged.partial.view(shape)
        ctx.name, ctx.has_output = name, output is not None
        ctx.save_for_backward(direction, x, total, *merged[2:])
        return x if output is None else (x, total)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, d_partial: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """All in one pass."""
        direction, x, partial, *numbers = ctx.saved_tensors
        if gradient is None:
            return *[None] * 5, d_partial, d_partial if ctx.has_output else None
        merged = Merged(rows(x), rows(partial), *numbers)
        later = None if d_partial is None else rows(d_partial)
        with without_autocast(direction):
            read, total = _backend(ctx.name).merge_running_backward(
                rows(gradient), later, direction, merged
            )
        total = total.view(x.shape)
        d_values, d_lse = read.values.view(x.shape), read.lse.view(x.shape[:-1])
        added = total if ctx.has_output else None
        return None, None, d_values, d_lse, read.direction, total, added


def _backend(name: Backend) -> DepthBackend:
    if name == "torch":
        return pytorch
    from megatron_residuals.kernels.depth_attention import triton

    return triton


def _all_rows(sources: Sequence[Tensor]) -> list[Tensor]:
    return [rows(source) for source in sources]


def _sums(
    sources: Sequence[Tensor], buffers: GradientBuffers, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Where gradients are to be added, of sources that have a buffer."""
    return [
        rows(buffer.accumulator(source)) if want and buffer is not None else None
        for source, buffer, want in zip(sources, buffers, needed, strict=True)
    ]


def _shaped(
    gradients: Sequence[Tensor | None], sources: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    pairs = zip(gradients, sources, strict=True)
    return tuple(None if each is None else each.view(source.shape) for each, source in pairs)
