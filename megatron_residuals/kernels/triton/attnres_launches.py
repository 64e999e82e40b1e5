# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Launches of the AttnRes kernels: the functions of ``depth_chunks`` with Triton.

Flat tensors on one device: planes [T, d], directions [S, d] and numbers per token in float32. What
they leave for backward has the tokens last, [S, m, T] and [m, T].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.kernels.depth_chunks import (
    ClosedForward,
    MergeBackward,
    MergeForward,
)
from megatron_residuals.kernels.triton import attnres_closed, attnres_closed_backward, attnres_tiles
from megatron_residuals.kernels.triton.attnres_merge import merge_backward_kernel, merge_kernel
from megatron_residuals.kernels.triton.attnres_read import read_backward_kernel, read_kernel
from megatron_residuals.kernels.triton.attnres_table import addresses, aligned
from megatron_residuals.kernels.triton.common import ceil_div, power_of_two


def read_forward(
    sources: Sequence[Tensor], direction: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, d], dots [m, T] and 1 / rms [m, T] of one reader."""
    sources = _contiguous(sources)
    (tokens, d), m = sources[0].shape, len(sources)
    x = torch.empty_like(sources[0])
    dots, inverse_rms = (_numbers(x, m, tokens) for _ in range(2))
    if tokens:
        size, num_warps = attnres_tiles.rows(d)
        read_kernel[(tokens,)](
            addresses(sources, x),
            direction.contiguous(),
            x,
            dots,
            inverse_rms,
            m,
            tokens,
            eps,
            D=d,
            BD=size,
            ALIGNED=aligned(*sources),
            num_warps=num_warps,
        )
    return x, dots, inverse_rms


def read_backward(
    gradient: Tensor,
    sources: Sequence[Tensor],
    direction: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
    totals: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradient of the direction [d], and those of wanted sources that have no total."""
    sources, gradient = _contiguous(sources), gradient.contiguous()
    (tokens, d), m = sources[0].shape, len(sources)
    pairs = list(zip(sources, totals, wanted, strict=True))
    fresh = [torch.empty_like(v) if want and t is None else None for v, t, want in pairs]
    totals = [total if want else None for _, total, want in pairs]
    per_program = attnres_tiles.row_group(tokens)
    parts = _numbers(gradient, ceil_div(tokens, per_program), d)
    if tokens:
        size, num_warps = attnres_tiles.rows(d)
        read_backward_kernel[(len(parts),)](
            addresses(sources, gradient),
            addresses(totals, parts),
            addresses(fresh, gradient),
            gradient,
            direction.contiguous(),
            dots,
            inverse_rms,
            parts,
            m,
            tokens,
            per_program,
            D=d,
            BD=size,
            BM=power_of_two(m, 8),
            ALIGNED=aligned(gradient, *sources, *totals, *fresh),
            num_warps=num_warps,
        )
    return parts.sum(0), fresh


def closed_forward(sources: Sequence[Tensor], directions: Tensor, eps: float) -> ClosedForward:
    """Weighted sums of the sources for every reader."""
    sources, directions = _contiguous(sources), directions.contiguous()
    (tokens, d), m, size = sources[0].shape, len(sources), len(directions)
    values = [torch.empty_like(sources[0]) for _ in range(size)]
    dots, inverse_rms = _numbers(sources[0], size, m, tokens), _numbers(sources[0], m, tokens)
    log_sums = _numbers(sources[0], size, tokens)
    found = ClosedForward(values, log_sums, dots, inverse_rms)
    if tokens == 0:
        return found
    table, counts = addresses(sources, sources[0]), (size, m, tokens)
    tile, wide = attnres_tiles.score_tile(d), aligned(*sources, *values)
    attnres_closed.scores_kernel[(ceil_div(tokens, tile.tokens), m, ceil_div(size, tile.readers))](
        table,
        sources[0],
        directions,
        dots,
        inverse_rms,
        *counts,
        eps,
        D=d,
        BT=tile.tokens,
        BS=tile.readers,
        BC=tile.channels,
        ALIGNED=wide,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    tile = attnres_tiles.mix_tile(d)
    attnres_closed.mix_kernel[
        (ceil_div(tokens, tile.tokens), ceil_div(d, tile.channels), ceil_div(size, tile.readers))
    ](
        table,
        addresses(values, sources[0]),
        sources[0],
        dots,
        inverse_rms,
        log_sums,
        *counts,
        D=d,
        BS=tile.readers,
        BT=tile.tokens,
        BC=tile.channels,
        ALIGNED=wide,
        num_warps=tile.num_warps,
    )
    return found


def closed_backward(
    gradients: Sequence[Tensor | None],
    d_log_sums: Sequence[Tensor | None],
    sources: Sequence[Tensor],
    directions: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
    totals: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradient of the directions [S, d], and those of wanted sources that have no total."""
    sources, directions = _contiguous(sources), directions.contiguous()
    gradients = [None if each is None else each.contiguous() for each in gradients]
    like, (tokens, d), m = sources[0], sources[0].shape, len(sources)
    size, fresh = len(directions), _zeros(sources, totals, wanted)
    sums = [
        (new if total is None else total) if want else None
        for new, total, want in zip(fresh, totals, wanted, strict=True)
    ]
    tile = attnres_tiles.accumulate_tile(d, like.element_size(), size)
    per_program = attnres_tiles.tile_group(tokens, tile)
    parts = _numbers(like, ceil_div(tokens, per_program), size, d)
    if tokens:
        wide = aligned(*sources, *gradients, *sums)
        table, gradient_table = addresses(sources, like), addresses(gradients, like)
        coefficients = [_numbers(like, size, m, tokens) for _ in range(3)]
        counts = (size, m, tokens)
        products = attnres_tiles.product_tile(d)
        attnres_closed_backward.products_kernel[
            (ceil_div(tokens, products.tokens), ceil_div(size, products.readers))
        ](
            table,
            gradient_table,
            like,
            dots,
            inverse_rms,
            _stacked(d_log_sums, like, tokens),
            *coefficients,
            *counts,
            D=d,
            BS=products.readers,
            BT=products.tokens,
            BM=power_of_two(m, 8),
            BC=products.channels,
            ALIGNED=wide,
            num_warps=products.num_warps,
        )
        attnres_closed_backward.accumulate_kernel[(ceil_div(d, tile.channels), len(parts))](
            table,
            addresses(sums, parts),
            gradient_table,
            like,
            directions,
            *coefficients,
            parts,
            *counts,
            per_program,
            D=d,
            BS=tile.readers,
            BT=tile.tokens,
            BC=tile.channels,
            ALIGNED=wide,
            num_warps=tile.num_warps,
        )
    return parts.sum(0), [None if new is None else new.to(like.dtype) for new in fresh]


def merge_forward(
    values: Tensor,
    log_sum: Tensor,
    direction: Tensor,
    partial: Tensor,
    output: Tensor | None,
    eps: float,
) -> MergeForward:
    """The running sum, an output added to it, merged with a reader's values."""
    values, partial = values.contiguous(), partial.contiguous()
    output = None if output is None else output.contiguous()
    tokens, d = partial.shape
    x = torch.empty_like(partial)
    total = partial if output is None else torch.empty_like(partial)
    dots, inverse_rms, share = (_numbers(partial, tokens) for _ in range(3))
    if tokens:
        size, num_warps = attnres_tiles.merge_rows(d)
        merge_kernel[(tokens,)](
            values,
            log_sum.contiguous(),
            direction.contiguous(),
            partial,
            partial if output is None else output,
            x,
            total,
            dots,
            inverse_rms,
            share,
            eps,
            D=d,
            BD=size,
            ADD=output is not None,
            num_warps=num_warps,
        )
    return MergeForward(x, total, dots, inverse_rms, share)


def merge_backward(
    gradient: Tensor, d_partial: Tensor | None, direction: Tensor, saved: MergeForward
) -> MergeBackward:
    """All gradients from those of x and of the running sum."""
    x, partial, dots, inverse_rms, share = saved
    x, partial, gradient = x.contiguous(), partial.contiguous(), gradient.contiguous()
    tokens, d = partial.shape
    d_values, d_total, d_log_sum = (torch.empty_like(each) for each in (x, x, share))
    per_program = attnres_tiles.row_group(tokens)
    parts = _numbers(x, ceil_div(tokens, per_program), d)
    if tokens:
        size, num_warps = attnres_tiles.rows(d)
        merge_backward_kernel[(len(parts),)](
            gradient,
            gradient if d_partial is None else d_partial.contiguous(),
            x,
            partial,
            direction.contiguous(),
            dots,
            inverse_rms,
            share,
            d_values,
            d_log_sum,
            d_total,
            parts,
            tokens,
            per_program,
            D=d,
            BD=size,
            ADD=d_partial is not None,
            num_warps=num_warps,
        )
    return MergeBackward(d_values, d_log_sum, parts.sum(0), d_total)


def _contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _numbers(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _stacked(rows: Sequence[Tensor | None], like: Tensor, tokens: int) -> Tensor:
    zeros = torch.zeros(tokens, dtype=torch.float32, device=like.device)
    return torch.stack([zeros if row is None else row.contiguous() for row in rows])


def _zeros(
    sources: Sequence[Tensor], totals: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Tensor | None]:
    return [
        torch.zeros_like(source, dtype=torch.float32) if want and total is None else None
        for source, total, want in zip(sources, totals, wanted, strict=True)
    ]
