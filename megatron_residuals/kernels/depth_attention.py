# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over depth whose backward needs references to the sources and two numbers for each."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from megatron_residuals.functional import depth_attention as reference
from megatron_residuals.functional.depth_attention import ClosedRead
from megatron_residuals.functional.precision import wide, without_autocast
from megatron_residuals.kernels import depth_chunks, fla_reads, liger_reads
from megatron_residuals.kernels.dispatch import resolve
from megatron_residuals.kernels.external import LIBRARIES, outside_graphs
from megatron_residuals.kernels.gradient_buffer import GradientBuffer

Buffers = Sequence[GradientBuffer | None]


def read_sources(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    *,
    eps: float,
    buffers: Buffers = (),
    backend: str = "auto",
) -> Tensor:
    """``functional.read_sources``, with lean autograd.

    ``buffers`` may give, for the first sources, where their gradients are to be added in float32
    instead of going through autograd; ``backend`` is ``auto``, ``torch``, ``triton``, or ``fla`` or
    ``liger`` (which sum them through autograd, and compute single reads only).
    """
    if backend in LIBRARIES:
        by = fla_reads.read_sources if backend == "fla" else liger_reads.read_sources
        return outside_graphs(by)(sources, query, key_gain, eps=eps)
    functions = _functions(backend, sources[0], "read of depth sources", tuple(LIBRARIES))
    if torch.compiler.is_compiling():
        if functions is depth_chunks:
            return reference.read_sources(sources, query, key_gain, eps=eps)
        direction = _direction(query, key_gain, sources[0])
        read: Tensor = _operators().read_sources(sources, direction, eps)
        return read
    padded = _padded(buffers, sources)
    x: Tensor = _ReadSources.apply(functions, eps, padded, query, key_gain, *sources)
    return x


def read_closed(
    sources: Sequence[Tensor],
    directions: Tensor,
    *,
    eps: float,
    buffers: Buffers = (),
    backend: str = "auto",
) -> tuple[ClosedRead, ...]:
    """``functional.read_closed`` in one pass over the sources, and one in backward.

    The backward runs when the gradients of all readers' values are there, and adds each source's
    gradient to its buffer.
    """
    functions = _functions(backend, sources[0], "first phase of a read")
    directions = directions.to(wide(sources[0]).dtype)
    if torch.compiler.is_compiling():
        if functions is depth_chunks:
            return reference.read_closed(sources, directions, eps=eps)
        reads = _operators().read_closed(sources, directions, eps)
        return tuple(map(ClosedRead, *reads, directions.unbind()))
    found = _ReadClosed.apply(functions, eps, _padded(buffers, sources), directions, *sources)
    size = len(directions)
    reads = zip(found[:size], found[size:], directions.unbind(), strict=True)
    return tuple(ClosedRead(*read) for read in reads)


def merge_running(
    values: Tensor,
    log_sum: Tensor,
    direction: Tensor,
    partial: Tensor,
    output: Tensor | None = None,
    *,
    eps: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``functional.merge_running``; kept besides the running sum: x, and three numbers per token.

    The sublayer's norm keeps x anyway.
    """
    functions = _functions(backend, partial, "second phase of a read")
    direction = direction.to(wide(partial).dtype)
    if torch.compiler.is_compiling():
        if functions is depth_chunks:
            return reference.merge_running(values, log_sum, direction, partial, output, eps=eps)
        merged: tuple[Tensor, Tensor] = _operators().merge_running(
            values, log_sum, direction, partial, output, eps
        )
        return merged
    found = _MergeRunning.apply(functions, eps, values, log_sum, direction, partial, output)
    return (found, partial) if output is None else found


def _functions(
    backend: str, tensor: Tensor, what: str, libraries: tuple[str, ...] = ()
) -> ModuleType:
    """The module that computes, without autograd and on flat tensors."""
    if resolve(backend, tensor, what=what, libraries=libraries) == "torch":
        return depth_chunks
    from megatron_residuals.kernels.triton import attnres_launches

    return attnres_launches


def _operators() -> Any:
    # for a compiler, which has no place for buffers and traces operators, not launches
    from megatron_residuals.kernels.triton import attnres_operators

    return attnres_operators


class _ReadSources(torch.autograd.Function):
    """x = sum_j softmax_j(r_j dot_j) V_j with dot_j = <V_j, q o gain> and r_j = 1 / rms(V_j).

    Saved besides the inputs: dot and r, float32 [m, T].
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: ModuleType,
        eps: float,
        buffers: Buffers,
        query: Tensor,
        key_gain: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        """The weighted sum."""
        direction = _direction(query, key_gain, sources[0])
        with without_autocast(direction):
            x, *numbers = functions.read_forward(_flat_all(sources), direction, eps)
        ctx.functions, ctx.buffers = functions, buffers
        ctx.save_for_backward(query, key_gain, *numbers, *sources)
        return cast(Tensor, x.view(sources[0].shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """One pass over the sources."""
        query, key_gain, dots, inverse_rms, *sources = ctx.saved_tensors
        wanted, direction = ctx.needs_input_grad[5:], _direction(query, key_gain, sources[0])
        with without_autocast(gradient):
            d_direction, fresh = ctx.functions.read_backward(
                _flat(gradient),
                _flat_all(sources),
                direction,
                dots,
                inverse_rms,
                _totals(sources, ctx.buffers, wanted),
                wanted,
            )
        d_query = (d_direction * key_gain).to(query.dtype)
        d_gain = (d_direction * query).to(key_gain.dtype)
        return None, None, None, d_query, d_gain, *_shaped(fresh, sources)


class _ReadClosed(torch.autograd.Function):
    """S readers of the same m sources: their values [..., d], then their log_sums [...].

    Saved besides the inputs: S m dots and m reciprocal rms per token, float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: ModuleType,
        eps: float,
        buffers: Buffers,
        directions: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        """One pass over the sources for all readers."""
        ctx.set_materialize_grads(False)
        shape = sources[0].shape
        with without_autocast(directions):
            found = functions.closed_forward(_flat_all(sources), directions, eps)
        ctx.functions, ctx.buffers = functions, buffers
        ctx.save_for_backward(directions, found.dots, found.inverse_rms, *sources)
        values = [each.view(shape) for each in found.values]
        # one storage each, as outputs must not be views of one tensor
        log_sums = [each.clone().view(shape[:-1]) for each in found.log_sums]
        return *values, *log_sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """All readers' gradients in one pass over the sources."""
        directions, dots, inverse_rms, *sources = ctx.saved_tensors
        size, wanted = len(directions), ctx.needs_input_grad[4:]
        with without_autocast(directions):
            d_directions, fresh = ctx.functions.closed_backward(
                [None if each is None else _flat(each) for each in gradients[:size]],
                [None if each is None else each.reshape(-1) for each in gradients[size:]],
                _flat_all(sources),
                directions,
                dots,
                inverse_rms,
                _totals(sources, ctx.buffers, wanted),
                wanted,
            )
        return None, None, None, d_directions, *_shaped(fresh, sources)


class _MergeRunning(torch.autograd.Function):
    """x, and with an output to be added the running sum behind it.

    Saved: x, the running sum, and of it dot, reciprocal rms and share, float32 [T].
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: ModuleType,
        eps: float,
        values: Tensor,
        log_sum: Tensor,
        direction: Tensor,
        partial: Tensor,
        output: Tensor | None,
    ) -> Any:
        """Add, score, merge."""
        ctx.set_materialize_grads(False)
        shape, added = partial.shape, None if output is None else _flat(output)
        with without_autocast(direction):
            x, total, *numbers = functions.merge_forward(
                _flat(values), log_sum.reshape(-1), direction, _flat(partial), added, eps
            )
        x, total = x.view(shape), partial if output is None else total.view(shape)
        ctx.functions, ctx.has_output = functions, output is not None
        ctx.save_for_backward(direction, x, total, *numbers)
        return x if output is None else (x, total)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, d_partial: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """All in one pass."""
        direction, x, partial, *numbers = ctx.saved_tensors
        if gradient is None:
            return *[None] * 5, d_partial, d_partial if ctx.has_output else None
        saved = depth_chunks.MergeForward(_flat(x), _flat(partial), *numbers)
        later = None if d_partial is None else _flat(d_partial)
        with without_autocast(direction):
            found = ctx.functions.merge_backward(_flat(gradient), later, direction, saved)
        total = found.partial.view(x.shape)
        return (
            None,
            None,
            found.values.view(x.shape),
            found.log_sum.view(x.shape[:-1]),
            found.direction,
            total,
            total if ctx.has_output else None,
        )


def _direction(query: Tensor, key_gain: Tensor, source: Tensor) -> Tensor:
    dtype = wide(source).dtype
    return query.to(dtype) * key_gain.to(dtype)


def _padded(buffers: Buffers, sources: Sequence[Tensor]) -> Buffers:
    return (*buffers, *[None] * (len(sources) - len(buffers)))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _flat_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_flat(tensor) for tensor in tensors]


def _shaped(
    gradients: Sequence[Tensor | None], sources: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    pairs = zip(gradients, sources, strict=True)
    return tuple(None if each is None else each.view(source.shape) for each, source in pairs)


def _totals(
    sources: Sequence[Tensor], buffers: Buffers, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Where gradients are to be added, of sources that have a buffer."""
    return [
        _flat(buffer.accumulator(source)) if want and buffer is not None else None
        for source, buffer, want in zip(sources, buffers, wanted, strict=True)
    ]
