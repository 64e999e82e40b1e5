# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Allocates what the kernels of streams write, and launches them. No tokens, no launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.kernels.coefficients import MhcWeights
from megatron_residuals.kernels.planes import Update
from megatron_residuals.kernels.sinkhorn import MhcOptions
from megatron_residuals.kernels.triton import tiles
from megatron_residuals.kernels.triton.common import ceil_div, power_of_two
from megatron_residuals.kernels.triton.mhc_backward import planes_backward_kernel
from megatron_residuals.kernels.triton.mhc_coefficients import (
    coefficients_backward_kernel,
    coefficients_kernel,
)
from megatron_residuals.kernels.triton.mhc_streams import (
    halves_kernel,
    post_and_mix_kernel,
    products_kernel,
    read_kernel,
)


def write(update: Update) -> Tensor:
    """The streams behind a write."""
    return _post_and_mix(update, None)[0]


def write_and_mix(before: Update | Tensor, mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The streams behind a write (if there is one), and their partial mixes."""
    return _post_and_mix(before, mapping)


def _post_and_mix(before: Update | Tensor, mapping: Tensor | None) -> tuple[Tensor, Tensor]:
    update = before if isinstance(before, Update) else None
    streams = before.streams if isinstance(before, Update) else before
    tokens, n, d = streams.shape
    tile = tiles.post_tile(n, d, updates=update is not None)
    split = tiles.split_channels(tile, d)
    splits, columns = ceil_div(d, split), 2 * n + n * n
    written = streams if update is None else torch.empty_like(streams)
    partial = streams.new_empty(
        splits if mapping is not None else 0, tokens, columns + 1, dtype=torch.float32
    )
    if tokens:
        if mapping is not None and streams.dtype == torch.bfloat16:
            mapping = halves_of(mapping)
        post_and_mix_kernel[(ceil_div(tokens, tile.tokens), splits)](
            *(streams, *(update[1:] if update else (None,) * 3), mapping),
            *(written if update else None, None if mapping is None else partial, tokens),
            N=n,
            D=d,
            K=columns,
            SPLIT=split,
            UPDATE=update is not None,
            MIX=mapping is not None,
            BT=tile.tokens,
            BC=tile.channels,
            BK=padded(columns) if mapping is not None else 16,
            HALVES=2 if mapping is not None and mapping.dtype == torch.bfloat16 else 1,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return written, partial


def padded(columns: int) -> int:
    """Rows of a mapping as tensor cores take them."""
    return power_of_two(columns, 16)


def halves_of(mapping: Tensor) -> Tensor:
    """The mapping [K, n d] as two of bfloat16, [2 BK, n d]; see ``halves_kernel``."""
    columns, width = mapping.shape
    result = mapping.new_empty(2 * padded(columns), width, dtype=torch.bfloat16)
    halves_kernel[(padded(columns), ceil_div(width, 2048))](
        mapping, result, ROWS=columns, COLUMNS=width, BK=padded(columns), BC=2048, num_warps=4
    )
    return result


def read(streams: Tensor, h_pre: Tensor) -> Tensor:
    """sum_i h_pre[i] streams[i]."""
    tokens, n, d = streams.shape
    result = streams.new_empty(tokens, d)
    tile = tiles.read_tile(d)
    if tokens:
        read_kernel[(ceil_div(tokens, tile.tokens), ceil_div(d, tile.channels))](
            *(streams, h_pre, result, tokens),
            N=n,
            D=d,
            BT=tile.tokens,
            BC=tile.channels,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return result


def products(gradient: Tensor, streams: Tensor, dtype: torch.dtype) -> Tensor:
    """<gradient, streams[i]> [T, n]."""
    tokens, n, d = streams.shape
    result = streams.new_empty(tokens, n, dtype=dtype)
    tile = tiles.product_tile(n, d)
    if tokens:
        products_kernel[(ceil_div(tokens, tile.tokens),)](
            *(gradient, streams, result, tokens),
            N=n,
            D=d,
            BT=tile.tokens,
            BC=tile.channels,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return result


def coefficients(
    partial: Tensor, weights: MhcWeights, num_streams: int, options: MhcOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h_pre, h_post, h_res, mixes."""
    n, (splits, tokens, columns) = num_streams, partial.shape
    mixes, h_pre = partial.new_empty(tokens, columns), partial.new_empty(tokens, n)
    h_post, h_res = torch.empty_like(h_pre), partial.new_empty(tokens, n, n)
    if tokens:
        coefficients_kernel[(ceil_div(tokens, tiles.COEFFICIENT_TOKENS),)](
            *(partial, weights.bias, weights.alpha, mixes, h_pre, h_post, h_res, tokens),
            N=n,
            D=weights.mapping.shape[1] // n,
            SPLITS=splits,
            ITERATIONS=options.iterations,
            DSV4=options.is_dsv4,
            NORM_EPS=options.eps,
            EPS=options.step_eps,
            BT=tiles.COEFFICIENT_TOKENS,
            num_warps=tiles.COEFFICIENT_WARPS,
        )
    return h_pre, h_post, h_res, mixes


class Carry(NamedTuple):
    """What the backward of the planes needs of each token [T, K + 1], and small gradients."""

    carry: Tensor
    d_bias: Tensor
    d_alpha: Tensor


def coefficients_backward(
    mixes: Tensor,
    weights: MhcWeights,
    gradients: tuple[Tensor, Tensor, Tensor],
    options: MhcOptions,
) -> Carry:
    """From the gradients of h_pre, h_post [T, n] and h_res [T, n, n]."""
    (tokens, columns), n = mixes.shape, gradients[0].shape[1]
    programs = ceil_div(tokens, tiles.COEFFICIENT_TOKENS)
    carry = torch.empty_like(mixes)
    partial = mixes.new_empty(programs, columns + 2)
    sums = mixes.new_empty(max(options.iterations - 1, 1) * 2 * n, tokens)
    if tokens:
        coefficients_backward_kernel[(programs,)](
            *(mixes, weights.bias, weights.alpha, *gradients, carry, partial, sums, tokens),
            N=n,
            D=weights.mapping.shape[1] // n,
            ITERATIONS=options.iterations,
            DSV4=options.is_dsv4,
            NORM_EPS=options.eps,
            EPS=options.step_eps,
            BT=tiles.COEFFICIENT_TOKENS,
            num_warps=tiles.COEFFICIENT_WARPS,
        )
    return Carry(carry, partial[:, :-3].sum(0), partial[:, -3:].sum(0))


class ReadBackward(NamedTuple):
    """The gradient of what was read [T, d], and h_pre [T, n].

    With ``carry``, ``mapping`` and ``written`` also what goes through the coefficients.
    """

    d_read: Tensor
    h_pre: Tensor
    carry: Tensor | None = None
    mapping: Tensor | None = None
    written: Tensor | None = None


class PlaneGradients(NamedTuple):
    """Of the streams (before the update if there is one), of the update, and of the mapping."""

    d_streams: Tensor
    update: tuple[Tensor, Tensor, Tensor]
    d_mapping: Tensor


def planes_backward(
    gradient: Tensor | None, read: ReadBackward | None, update: Update | None, like: Tensor
) -> PlaneGradients:
    """All gradients of planes from that of the streams behind the update, if they have any, and

    from what was read of them; ``like`` is a tensor of the shape and dtype of the streams. What
    there is no update or mapping for is empty.
    """
    tokens, n, d = like.shape
    columns, mix = 2 * n + n * n, read is not None and read.mapping is not None
    tile = tiles.plane_tile(n, d, like.dtype)
    slices = ceil_div(d, tile.channels)
    groups = ceil_div(tokens, tiles.GROUP_STEPS * tile.tokens)
    d_streams = torch.empty_like(like)
    d_output = like.new_empty((tokens, d) if update else 0)
    wide = torch.empty(0, dtype=torch.float32, device=like.device)
    shares = wide.new_empty(slices, tokens if update else 0, n + n * n)
    d_mapping = wide.new_empty(groups, columns if mix else 0, n * d)
    d_read, h_pre, carry, mapping, written = read or (None,) * 5
    if tokens:
        if mapping is not None and like.dtype == torch.bfloat16:
            mapping = halves_of(mapping)
        planes_backward_kernel[(slices, groups)](
            *(gradient, d_read, h_pre, carry, mapping, written, *(update or (None,) * 4)),
            *(d_streams, d_output, shares, d_mapping, tokens),
            N=n,
            D=d,
            K=columns,
            GRADIENT=gradient is not None,
            READ=read is not None,
            MIX=mix,
            UPDATE=update is not None,
            STEPS=tiles.GROUP_STEPS,
            BT=tile.tokens,
            BC=tile.channels,
            BK=padded(columns) if mix else 16,
            HALVES=2 if mapping is not None and mapping.dtype == torch.bfloat16 else 1,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    d_post, d_res = shares[..., :n].sum(0), shares[..., n:].sum(0)
    d_update = (d_output, d_post, d_res.view(-1, n, n))
    return PlaneGradients(d_streams, d_update, d_mapping.sum(0))
