# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Allocates what the kernels of streams write, and launches them. No tokens, no launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_residuals.functional.streams import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamUpdate,
)
from megatron_residuals.kernels.common.triton import ceil_div, power_of_two
from megatron_residuals.kernels.streams.triton import tiles
from megatron_residuals.kernels.streams.triton.coefficients import (
    coefficients_backward_kernel,
    coefficients_kernel,
)
from megatron_residuals.kernels.streams.triton.passes import (
    halves_kernel,
    read_streams_kernel,
    stream_products_kernel,
    write_and_mix_kernel,
)
from megatron_residuals.kernels.streams.triton.passes_backward import streams_backward_kernel


def write(update: StreamUpdate) -> Tensor:
    """The streams behind a write."""
    return write_and_mix(update, None)[0]


def write_and_mix(
    before: StreamUpdate | Tensor, mapping: Tensor | None, reads: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The streams behind a write (those given if there is none), their partial mixes, their read.

    The read is empty without ``reads`` [T, n], its weights, and the mixes are without a mapping.
    """
    updates, mixes = isinstance(before, StreamUpdate), mapping is not None
    streams, *update = before if isinstance(before, StreamUpdate) else (before, None, None, None)
    tokens, n, d = streams.shape
    tile = tiles.write_tile(n, d, updates=updates)
    split = tiles.split_channels(tile, d)
    splits, columns = ceil_div(d, split), 0 if mapping is None else mapping.shape[0]
    written = torch.empty_like(streams) if updates else streams
    partial = streams.new_empty(splits if mixes else 0, tokens, columns + 1, dtype=torch.float32)
    read = streams.new_empty(0 if reads is None else tokens, d)
    if tokens:
        operand = None if mapping is None else _operand(mapping, streams.dtype)
        write_and_mix_kernel[(ceil_div(tokens, tile.tokens), splits)](
            streams,
            *update,
            operand,
            reads,
            written if updates else None,
            partial if mixes else None,
            None if reads is None else read,
            tokens,
            N=n,
            D=d,
            K=columns,
            SPLIT=split,
            UPDATE=updates,
            RES=update[-1] is not None,
            MIX=mixes,
            READ=reads is not None,
            BK=_padded(columns) if mixes else 16,
            HALVES=_halves(operand),
            **tile.options,
        )
    return written, partial, read


def _padded(columns: int) -> int:
    """Rows of a mapping as tensor cores take them."""
    return power_of_two(columns, 16)


def _operand(mapping: Tensor, dtype: torch.dtype) -> Tensor:
    """The mapping [K, n d] as it is multiplied with activations of a dtype.

    That is itself, or for bfloat16 two of bfloat16, [2 BK, n d]; see ``halves_kernel``.
    """
    if dtype != torch.bfloat16:
        return mapping
    columns, width = mapping.shape
    rows = _padded(columns)
    result = mapping.new_empty(2 * rows, width, dtype=dtype)
    halves_kernel[(rows, ceil_div(width, 2048))](
        mapping, result, ROWS=columns, COLUMNS=width, BK=rows, BC=2048, num_warps=4
    )
    return result


def _halves(operand: Tensor | None) -> int:
    return 2 if operand is not None and operand.dtype == torch.bfloat16 else 1


def read(streams: Tensor, h_pre: Tensor) -> Tensor:
    """sum_i h_pre[i] streams[i]."""
    tokens, n, d = streams.shape
    result, tile = streams.new_empty(tokens, d), tiles.read_tile(d)
    if tokens:
        read_streams_kernel[(ceil_div(tokens, tile.tokens), ceil_div(d, tile.channels))](
            streams, h_pre, result, tokens, N=n, D=d, **tile.options
        )
    return result


def products(gradient: Tensor, streams: Tensor, dtype: torch.dtype) -> Tensor:
    """<gradient, streams[i]> [T, n]."""
    tokens, n, d = streams.shape
    result, tile = streams.new_empty(tokens, n, dtype=dtype), tiles.products_tile(n, d)
    if tokens:
        stream_products_kernel[(ceil_div(tokens, tile.tokens),)](
            gradient, streams, result, tokens, N=n, D=d, **tile.options
        )
    return result


def coefficients(
    partial: Tensor, weights: MhcWeights, num_streams: int, options: MhcOptions
) -> tuple[StreamCoefficients, Tensor]:
    """All coefficients from partial mixes [splits, T, K + 1], and the mixes [T, K + 1]."""
    n, (splits, tokens, columns) = num_streams, partial.shape
    mixes, h_pre = partial.new_empty(tokens, columns), partial.new_empty(tokens, n)
    h_post = torch.empty_like(h_pre)
    h_res = partial.new_empty(tokens, n, n) if options.mixes else None
    if tokens:
        coefficients_kernel[(ceil_div(tokens, tiles.COEFFICIENT_TOKENS),)](
            partial,
            weights.bias,
            weights.alpha,
            mixes,
            h_pre,
            h_post,
            h_res,
            tokens,
            SPLITS=splits,
            **_sizes(weights, n, options),
        )
    return StreamCoefficients(h_pre, h_post, h_res), mixes


def coefficients_backward(
    mixes: Tensor, weights: MhcWeights, gradients: StreamCoefficients, options: MhcOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward of the streams needs of each token [T, K + 1]; d_bias, d_alpha."""
    (tokens, columns), n = mixes.shape, gradients.h_pre.shape[1]
    programs = ceil_div(tokens, tiles.COEFFICIENT_TOKENS)
    carry = torch.empty_like(mixes)
    alphas = weights.alpha.shape[0]
    partial = mixes.new_empty(programs, columns - 1 + alphas)
    sums = mixes.new_empty(max(options.iterations - 1, 1) * 2 * n, tokens)
    if tokens:
        coefficients_backward_kernel[(programs,)](
            mixes,
            weights.bias,
            weights.alpha,
            *gradients,
            carry,
            partial,
            sums,
            tokens,
            **_sizes(weights, n, options),
        )
    return carry, partial[:, :-alphas].sum(0), partial[:, -alphas:].sum(0)


def _sizes(weights: MhcWeights, num_streams: int, options: MhcOptions) -> dict[str, int | float]:
    """Of both kernels of coefficients."""
    return dict(
        N=num_streams,
        D=weights.mapping.shape[1] // num_streams,
        ITERATIONS=options.iterations,
        DSV4=options.is_dsv4,
        RES=options.mixes,
        NORM_EPS=options.eps,
        EPS=options.step_eps,
        POST_EPS=options.post_eps,
        BT=tiles.COEFFICIENT_TOKENS,
        num_warps=tiles.COEFFICIENT_WARPS,
    )


class ReadGradient(NamedTuple):
    """The gradient of what was read [T, d], and h_pre [T, n].

    With ``carry``, ``mapping`` and ``streams`` also what goes through the coefficients.
    """

    d_x: Tensor
    h_pre: Tensor
    carry: Tensor | None = None
    mapping: Tensor | None = None
    streams: Tensor | None = None


def streams_backward(
    gradient: Tensor | None, read: ReadGradient | None, update: StreamUpdate | None, like: Tensor
) -> tuple[StreamUpdate, Tensor]:
    """Gradients of a write and of the mapping from all that has come of the streams behind it.

    ``gradient`` is that of these streams, if they have one, ``read`` that of what was read of them;
    ``like`` is a tensor of their shape and dtype. Without an update, its gradient of the streams is
    theirs. What there is no update or mapping for is empty.
    """
    tokens, n, d = like.shape
    mix = read is not None and read.mapping is not None
    columns = read.mapping.shape[0] if read is not None and read.mapping is not None else 0
    mixes = update is not None and update.h_res is not None
    tile = tiles.backward_tile(n, d, like.dtype)
    slices = ceil_div(d, tile.channels)
    groups = ceil_div(tokens, tiles.GROUP_STEPS * tile.tokens)
    d_streams = torch.empty_like(like)
    d_output = like.new_empty((tokens, d) if update else 0)
    wide = torch.empty(0, dtype=torch.float32, device=like.device)
    shares = wide.new_empty(slices, tokens if update else 0, n + mixes * n * n)
    d_mapping = wide.new_empty(groups, columns, n * d)
    if tokens:
        d_x, h_pre, carry, mapping, streams = read or (None,) * 5
        operand = None if mapping is None else _operand(mapping, like.dtype)
        streams_backward_kernel[(slices, groups)](
            gradient,
            d_x,
            h_pre,
            carry,
            operand,
            streams,
            *(update or (None,) * 4),
            d_streams,
            d_output,
            shares,
            d_mapping,
            tokens,
            N=n,
            D=d,
            K=columns,
            GRADIENT=gradient is not None,
            READ=read is not None,
            MIX=mix,
            UPDATE=update is not None,
            RES=mixes,
            STEPS=tiles.GROUP_STEPS,
            BT=tile.tokens,
            BC=tile.channels,
            BK=_padded(columns) if mix else 16,
            HALVES=_halves(operand),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    d_post = shares[..., :n].sum(0)
    d_res = shares[..., n:].sum(0).view(-1, n, n) if mixes else None
    return StreamUpdate(d_streams, d_output, d_post, d_res), d_mapping.sum(0)
