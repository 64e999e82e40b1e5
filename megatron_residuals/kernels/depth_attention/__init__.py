# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over depth as it is trained: backward needs the sources and two numbers for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.functional import depth_attention as reference
from megatron_residuals.functional.depth_attention import ClosedRead
from megatron_residuals.functional.precision import wide_dtype
from megatron_residuals.kernels.common.autograd import recomputed
from megatron_residuals.kernels.common.dispatch import Backend, resolve
from megatron_residuals.kernels.common.gradient_buffer import GradientBuffer, depositing
from megatron_residuals.kernels.common.libraries import LIBRARIES, outside_graphs
from megatron_residuals.kernels.depth_attention import libraries
from megatron_residuals.kernels.depth_attention.autograd import (
    MergeRunning,
    ReadClosed,
    ReadSources,
)


def read_sources(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    *,
    eps: float,
    buffers: Sequence[GradientBuffer | None] = (),
    backend: str = "auto",
) -> Tensor:
    """``functional.read_sources``, with lean autograd.

    ``buffers`` may give, for the first sources, where their gradients are to be added in float32
    instead of going through autograd; ``backend`` is ``auto``, ``torch``, ``triton``, or ``fla`` or
    ``liger`` (which sum them through autograd, and compute single reads only).

    Raises:
        ValueError: unknown backend, or one that does not take the dtype or size.
        RuntimeError: the backend was asked for and cannot run.
    """
    if backend in LIBRARIES:
        read = outside_graphs(libraries.read_sources)
        return read(backend, sources, query, key_gain, eps=eps)
    chosen = resolve(backend, sources[0], what="read of depth sources", libraries=tuple(LIBRARIES))
    if _is_left_to_a_compiler(chosen):
        return reference.read_sources(sources, query, key_gain, eps=eps)
    x: Tensor = ReadSources.apply(
        chosen, eps, _by_source(buffers, sources), query, key_gain, *sources
    )
    return x


def read_by_heads(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    *,
    eps: float,
    heads: int,
    additive: bool,
    buffers: Sequence[GradientBuffer | None] = (),
) -> Tensor:
    """``functional.read_by_heads``; keeps references to its inputs, in plain PyTorch everywhere.

    ``buffers`` as in ``read_sources``.
    """

    def read(query: Tensor, key_gain: Tensor, *sources: Tensor) -> Tensor:
        return reference.read_by_heads(
            sources, query, key_gain, eps=eps, heads=heads, additive=additive
        )

    pairs = zip(sources, _by_source(buffers, sources), strict=True)
    x: Tensor = recomputed(read, query, key_gain, *(depositing(*pair) for pair in pairs))
    return x


def read_closed(
    sources: Sequence[Tensor],
    directions: Tensor,
    *,
    eps: float,
    buffers: Sequence[GradientBuffer | None] = (),
    backend: str = "auto",
) -> tuple[ClosedRead, ...]:
    """``functional.read_closed`` in one pass over the sources, and one in backward.

    The backward runs when the gradients of all readers' values are there, and adds each source's
    gradient to its buffer. Raises as ``read_sources``; the libraries do not have it.
    """
    chosen = resolve(backend, sources[0], what="phase 1 of a read")
    directions = directions.to(wide_dtype(sources[0])).contiguous()
    if _is_left_to_a_compiler(chosen):
        return reference.read_closed(sources, directions, eps=eps)
    found = ReadClosed.apply(chosen, eps, _by_source(buffers, sources), directions, *sources)
    size = len(directions)
    reads = zip(found[:size], found[size:], directions.unbind(), strict=True)
    return tuple(ClosedRead(*read) for read in reads)


def merge_running(
    read: ClosedRead,
    partial: Tensor,
    output: Tensor | None = None,
    *,
    eps: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``functional.merge_running``; kept besides the running sum: x, and three numbers per token.

    The sublayer's norm keeps x anyway. Raises as ``read_closed``.
    """
    chosen = resolve(backend, partial, what="phase 2 of a read")
    direction = read.direction.to(wide_dtype(partial)).contiguous()
    read = read._replace(direction=direction)
    if _is_left_to_a_compiler(chosen):
        return reference.merge_running(read, partial, output, eps=eps)
    found = MergeRunning.apply(chosen, eps, *read, partial, output)
    return (found, partial) if output is None else found


def _is_left_to_a_compiler(chosen: Backend) -> bool:
    """It fuses the plain formulas better than the chunks made for a cache."""
    return chosen == "torch" and torch.compiler.is_compiling()


def _by_source(
    buffers: Sequence[GradientBuffer | None], sources: Sequence[Tensor]
) -> tuple[GradientBuffer | None, ...]:
    """One for each source; none for what a compiler traces, where sums are the graph's own."""
    known = () if torch.compiler.is_compiling() else tuple(buffers)
    return *known, *[None] * (len(sources) - len(known))
