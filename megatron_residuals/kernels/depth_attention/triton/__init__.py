# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The backend in Triton: the functions of the contract, over custom operators.

Imported only when it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_residuals.functional.depth_attention import ClosedRead, SourceScores
from megatron_residuals.kernels.depth_attention.contract import Merged, OptionalTensors
from megatron_residuals.kernels.depth_attention.triton import operators


def read_sources(
    sources: Sequence[Tensor], direction: Tensor, eps: float
) -> tuple[Tensor, SourceScores]:
    """As the contract says."""
    x, *scores = operators.read_sources(sources, direction, eps)
    return x, SourceScores(*scores)


def read_sources_backward(
    gradient: Tensor,
    sources: Sequence[Tensor],
    direction: Tensor,
    scores: SourceScores,
    sums: OptionalTensors,
    fresh: OptionalTensors,
) -> Tensor:
    """As the contract says."""
    changed = *_packed(sums), *_packed(fresh)
    d_direction: Tensor = operators.read_sources_backward(
        gradient, sources, direction, list(scores), *changed
    )
    return d_direction


def read_closed(
    sources: Sequence[Tensor], directions: Tensor, eps: float
) -> tuple[list[Tensor], Tensor, SourceScores]:
    """As the contract says."""
    *values, lses, dots, rstd = operators.read_closed(sources, directions, eps)
    return values, lses, SourceScores(dots, rstd)


def read_closed_backward(
    gradients: OptionalTensors,
    d_lses: OptionalTensors,
    sources: Sequence[Tensor],
    directions: Tensor,
    scores: SourceScores,
    sums: OptionalTensors,
) -> Tensor:
    """As the contract says."""
    d_directions: Tensor = operators.read_closed_backward(
        gradients, d_lses, sources, directions, list(scores), *_packed(sums)
    )
    return d_directions


def merge_running(read: ClosedRead, partial: Tensor, output: Tensor | None, eps: float) -> Merged:
    """As the contract says."""
    merged = Merged(*operators.merge_running(list(read), partial, output, eps))
    return merged._replace(partial=partial) if output is None else merged


def merge_running_backward(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, merged: Merged
) -> tuple[ClosedRead, Tensor]:
    """As the contract says."""
    found = operators.merge_running_backward(gradient, d_partial, direction, list(merged))
    *read, total = found
    return ClosedRead(*read), total


def _packed(tensors: OptionalTensors) -> tuple[list[Tensor], list[int]]:
    """Those that there are, and their places."""
    there = [(place, each) for place, each in enumerate(tensors) if each is not None]
    return [each for _, each in there], [place for place, _ in there]
