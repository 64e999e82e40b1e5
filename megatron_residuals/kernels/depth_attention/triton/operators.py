# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Custom operators around the launches.

Tensors as in the contract. An operator that changes tensors in place takes those that there are,
and the numbers of the sources they belong to: compilers know no lists with gaps that change. Its
results are never views of its arguments; one that has nothing to return in a place returns an
empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import ClosedRead, SourceScores
from megatron_residuals.kernels.common.triton import custom_operator
from megatron_residuals.kernels.depth_attention.contract import Merged
from megatron_residuals.kernels.depth_attention.triton import launches


def spread(tensors: Sequence[Tensor], places: Sequence[int], count: int) -> list[Tensor | None]:
    """A list of ``count``, with each tensor in its place."""
    found: list[Tensor | None] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return found


@custom_operator(
    "read_sources(Tensor[] sources, Tensor direction, float eps) -> (Tensor, Tensor, Tensor)"
)
def read_sources(
    sources: list[Tensor], direction: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, d] of one reader; dots and rstd [m, T]."""
    x, scores = launches.read(sources, direction, eps)
    return x, *scores


@read_sources.register_fake
def _(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(sources), sources[0].shape[0]
    return torch.empty_like(sources[0]), direction.new_empty(shape), direction.new_empty(shape)


@custom_operator(
    "read_sources_backward(Tensor gradient, Tensor[] sources, Tensor direction, Tensor[] scores, "
    "Tensor(a!)[] sums, int[] of_sums, Tensor(b!)[] fresh, int[] of_fresh) -> Tensor",
    changes=("sums", "fresh"),
)
def read_sources_backward(
    gradient: Tensor,
    sources: list[Tensor],
    direction: Tensor,
    scores: list[Tensor],
    sums: list[Tensor],
    of_sums: list[int],
    fresh: list[Tensor],
    of_fresh: list[int],
) -> Tensor:
    """The gradient of the direction."""
    totals, written = spread(sums, of_sums, len(sources)), spread(fresh, of_fresh, len(sources))
    given = gradient, sources, direction, SourceScores(*scores)
    return launches.read_backward(*given, totals, written)


@read_sources_backward.register_fake
def _(gradient: Tensor, sources: list[Tensor], direction: Tensor, *_: object) -> Tensor:
    return torch.empty_like(direction)


@custom_operator("read_closed(Tensor[] sources, Tensor directions, float eps) -> Tensor[]")
def read_closed(sources: list[Tensor], directions: Tensor, eps: float) -> list[Tensor]:
    """Phase 1: values [T, d] of S readers, lse [S, T]; dots [S, m, T], rstd [m, T]."""
    values, lses, scores = launches.closed(sources, directions, eps)
    return [*values, lses, *scores]


@read_closed.register_fake
def _(sources: list[Tensor], directions: Tensor, eps: float) -> list[Tensor]:
    size, m, tokens = len(directions), len(sources), sources[0].shape[0]
    shapes = (size, tokens), (size, m, tokens), (m, tokens)
    values = [torch.empty_like(sources[0]) for _ in range(size)]
    return [*values, *map(directions.new_empty, shapes)]


@custom_operator(
    "read_closed_backward(Tensor?[] gradients, Tensor?[] d_lses, Tensor[] sources, "
    "Tensor directions, Tensor[] scores, Tensor(a!)[] sums, int[] of_sums) -> Tensor",
    changes=("sums",),
)
def read_closed_backward(
    gradients: list[Tensor | None],
    d_lses: list[Tensor | None],
    sources: list[Tensor],
    directions: Tensor,
    scores: list[Tensor],
    sums: list[Tensor],
    of_sums: list[int],
) -> Tensor:
    """The gradients of the directions."""
    totals = spread(sums, of_sums, len(sources))
    given = gradients, d_lses, sources, directions, SourceScores(*scores)
    return launches.closed_backward(*given, totals)


@read_closed_backward.register_fake
def _(gradients: object, d_lses: object, sources: object, directions: Tensor, *_: object) -> Tensor:
    return torch.empty_like(directions)


@custom_operator(
    "merge_running(Tensor[] read, Tensor partial, Tensor? output, float eps) -> Tensor[]"
)
def merge_running(
    read: list[Tensor], partial: Tensor, output: Tensor | None, eps: float
) -> list[Tensor]:
    """Phase 2: x, the sum with an output (empty without one); dots, rstd, weight [T]."""
    merged = launches.merge(ClosedRead(*read), partial, output, eps)
    return list(merged._replace(partial=partial.new_empty(0)) if output is None else merged)


@merge_running.register_fake
def _(read: list[Tensor], partial: Tensor, output: Tensor | None, eps: float) -> list[Tensor]:
    total = partial.new_empty(0) if output is None else torch.empty_like(partial)
    return [torch.empty_like(partial), total, *[torch.empty_like(read[1]) for _ in range(3)]]


@custom_operator(
    "merge_running_backward(Tensor gradient, Tensor? d_partial, Tensor direction, "
    "Tensor[] merged) -> Tensor[]"
)
def merge_running_backward(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, merged: list[Tensor]
) -> list[Tensor]:
    """Gradients of values, lse, direction; of the running sum, which is the output's too."""
    read, total = launches.merge_backward(gradient, d_partial, direction, Merged(*merged))
    return [*read, total]


@merge_running_backward.register_fake
def _(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, merged: list[Tensor]
) -> list[Tensor]:
    x, weight = merged[0], merged[-1]
    return [torch.empty_like(each) for each in (x, weight, direction, x)]
