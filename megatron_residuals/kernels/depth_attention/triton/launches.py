# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Allocates what the kernels of depth attention write, and launches them. No tokens, no launch.

Tensors as in the contract; scores have the tokens last, dots [S, m, T] and rstd [m, T].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.functional.depth_attention import ClosedRead, SourceScores
from megatron_residuals.kernels.common.triton import Tile, ceil_div, power_of_two
from megatron_residuals.kernels.depth_attention.contract import Merged, OptionalTensors
from megatron_residuals.kernels.depth_attention.triton import tiles
from megatron_residuals.kernels.depth_attention.triton.phase_one import (
    accumulate_kernel,
    mix_kernel,
    scores_kernel,
    source_products_kernel,
)
from megatron_residuals.kernels.depth_attention.triton.phase_two import (
    merge_backward_kernel,
    merge_kernel,
)
from megatron_residuals.kernels.depth_attention.triton.read import (
    read_sources_backward_kernel,
    read_sources_kernel,
)
from megatron_residuals.kernels.depth_attention.triton.table import addresses, aligned


def read(sources: Sequence[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, SourceScores]:
    """x [T, d] of one reader, with dots and rstd [m, T]."""
    x, (tokens, d), m = torch.empty_like(sources[0]), sources[0].shape, len(sources)
    scores = SourceScores(_numbers(x, m, tokens), _numbers(x, m, tokens))
    if tokens:
        size, num_warps = tiles.rows(d)
        read_sources_kernel[(tokens,)](
            addresses(sources, x),
            direction,
            x,
            *scores,
            m,
            tokens,
            eps,
            D=d,
            BD=size,
            ALIGNED=aligned(*sources),
            num_warps=num_warps,
        )
    return x, scores


def read_backward(
    gradient: Tensor,
    sources: Sequence[Tensor],
    direction: Tensor,
    scores: SourceScores,
    sums: OptionalTensors,
    fresh: OptionalTensors,
) -> Tensor:
    """The gradient of the direction [d]; those of sources go to ``sums`` or ``fresh``."""
    (tokens, d), m = gradient.shape, len(sources)
    per_program = tiles.row_group(tokens)
    parts = _numbers(gradient, ceil_div(tokens, per_program), d)
    if tokens:
        size, num_warps = tiles.rows(d)
        read_sources_backward_kernel[(len(parts),)](
            addresses(sources, gradient),
            addresses(sums, parts),
            addresses(fresh, gradient),
            gradient,
            direction,
            *scores,
            parts,
            m,
            tokens,
            per_program,
            D=d,
            BD=size,
            BM=power_of_two(m, 8),
            ALIGNED=aligned(gradient, *sources, *sums, *fresh),
            num_warps=num_warps,
        )
    return parts.sum(0)


def closed(
    sources: Sequence[Tensor], directions: Tensor, eps: float
) -> tuple[list[Tensor], Tensor, SourceScores]:
    """Weighted sums of the sources for every reader, their lse [S, T], and the scores."""
    like, (tokens, d), m, size = sources[0], sources[0].shape, len(sources), len(directions)
    values = [torch.empty_like(like) for _ in range(size)]
    scores = SourceScores(_numbers(like, size, m, tokens), _numbers(like, m, tokens))
    lses = _numbers(like, size, tokens)
    if tokens:
        table, counts = addresses(sources, like), (size, m, tokens)
        common = dict(D=d, ALIGNED=aligned(*sources, *values))
        tile = tiles.SCORES.within(d)
        scores_kernel[(ceil_div(tokens, tile.tokens), m, _groups(size, tile))](
            table, like, directions, *scores, *counts, eps, **common, **tile.options
        )
        tile = tiles.MIX.within(d)
        grid = ceil_div(tokens, tile.tokens), ceil_div(d, tile.channels), _groups(size, tile)
        mix_kernel[grid](
            table,
            addresses(values, like),
            like,
            *scores,
            lses,
            *counts,
            **common,
            **tile.options,
        )
    return values, lses, scores


def closed_backward(
    gradients: OptionalTensors,
    d_lses: OptionalTensors,
    sources: Sequence[Tensor],
    directions: Tensor,
    scores: SourceScores,
    sums: OptionalTensors,
) -> Tensor:
    """The gradients of the directions [S, d]; those of sources are added to ``sums``."""
    like, (tokens, d), m, size = sources[0], sources[0].shape, len(sources), len(directions)
    tile = tiles.accumulate_tile(d, like.element_size(), size)
    per_program = tiles.tile_group(tokens, tile)
    parts = _numbers(like, ceil_div(tokens, per_program), size, d)
    if tokens:
        table, gradient_table = addresses(sources, like), addresses(gradients, like)
        coefficients = [_numbers(like, size, m, tokens) for _ in range(3)]
        counts = (size, m, tokens)
        common = dict(D=d, ALIGNED=aligned(*sources, *gradients, *sums))
        products = tiles.PRODUCTS.within(d)
        source_products_kernel[(ceil_div(tokens, products.tokens), _groups(size, products))](
            table,
            gradient_table,
            like,
            *scores,
            _stacked(d_lses, like, tokens),
            *coefficients,
            *counts,
            BM=power_of_two(m, 8),
            **common,
            **products.options,
        )
        accumulate_kernel[(ceil_div(d, tile.channels), len(parts))](
            table,
            addresses(sums, parts),
            gradient_table,
            like,
            directions,
            *coefficients,
            parts,
            *counts,
            per_program,
            **common,
            **tile.options,
        )
    return parts.sum(0)


def merge(read: ClosedRead, partial: Tensor, output: Tensor | None, eps: float) -> Merged:
    """The running sum, an output added to it, merged with a reader's values."""
    tokens, d = partial.shape
    total = partial if output is None else torch.empty_like(partial)
    numbers = [_numbers(partial, tokens) for _ in range(3)]
    merged = Merged(torch.empty_like(partial), total, *numbers)
    if tokens:
        size, num_warps = tiles.merge_rows(d)
        merge_kernel[(tokens,)](
            *read,
            partial,
            partial if output is None else output,
            *merged,
            eps,
            D=d,
            BD=size,
            ADD=output is not None,
            num_warps=num_warps,
        )
    return merged


def merge_backward(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, merged: Merged
) -> tuple[ClosedRead, Tensor]:
    """All gradients from those of x and of the running sum."""
    x, partial, dots, rstd, weight = merged
    tokens, d = x.shape
    d_values, d_total, d_lse = (torch.empty_like(each) for each in (x, x, weight))
    per_program = tiles.row_group(tokens)
    parts = _numbers(x, ceil_div(tokens, per_program), d)
    if tokens:
        size, num_warps = tiles.rows(d)
        merge_backward_kernel[(len(parts),)](
            gradient,
            gradient if d_partial is None else d_partial,
            x,
            partial,
            direction,
            dots,
            rstd,
            weight,
            d_values,
            d_lse,
            d_total,
            parts,
            tokens,
            per_program,
            D=d,
            BD=size,
            ADD=d_partial is not None,
            num_warps=num_warps,
        )
    return ClosedRead(d_values, d_lse, parts.sum(0)), d_total


def _groups(readers: int, tile: Tile) -> int:
    return ceil_div(readers, tile.readers or 1)


def _numbers(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _stacked(rows: OptionalTensors, like: Tensor, tokens: int) -> Tensor:
    zeros = torch.zeros(tokens, dtype=torch.float32, device=like.device)
    return torch.stack([zeros if row is None else row for row in rows])
