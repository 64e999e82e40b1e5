# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The boundary of two mHC sublayers as a sequence of launches.

Up to four streams the projection is part of the passes over the planes: 3n + 2 planes forward and
5n + 4 backward. More have too many coefficients for that; their projections are plain matrix
products, and their coefficients those of plain PyTorch. So are those of sums of permutations. With
the weights of the read given (Single-Pass mHC) it is part of the first pass: 2n + 2 planes forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_residuals.functional.streams import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamRead,
    StreamUpdate,
)
from megatron_residuals.kernels.streams.contract import Kept
from megatron_residuals.kernels.streams.pytorch.coefficients import (
    bias_and_alpha_backward,
    gate,
    gate_slopes,
    mixes_backward,
    tokens_first,
    tokens_last,
    update_coefficients,
    update_coefficients_backward,
)
from megatron_residuals.kernels.streams.pytorch.passes import chunks, project
from megatron_residuals.kernels.streams.triton import launches
from megatron_residuals.kernels.streams.triton.tiles import MAX_FUSED_STREAMS


def is_fused(num_streams: int, options: MhcOptions) -> bool:
    """Whether kernels project and compute the coefficients."""
    return num_streams <= MAX_FUSED_STREAMS and not options.factors(num_streams)


def mixes_shape(
    tokens: int, num_streams: int, columns: int, options: MhcOptions
) -> tuple[int, int]:
    """Of what is kept of K projections: as the kernels, or as plain PyTorch have them."""
    fused = is_fused(num_streams, options)
    return (tokens, columns + 1) if fused else (columns + 1, tokens)


def update_and_read(
    before: StreamUpdate | Tensor,
    weights: MhcWeights,
    options: MhcOptions,
    reads: Tensor | None,
) -> tuple[StreamRead, Tensor]:
    """As the contract says; of streams alone, these streams."""
    n = (before.streams if isinstance(before, StreamUpdate) else before).shape[1]
    if is_fused(n, options):
        written, partial, x = launches.write_and_mix(before, weights.mapping, reads)
        found, mixes = launches.coefficients(partial, weights, n, options)
        if reads is not None:
            return StreamRead(written, x, *found), mixes
    else:
        written = launches.write(before) if isinstance(before, StreamUpdate) else before
        mixes = _mixes(written, weights)
        found = _coefficients(mixes, weights, n, options)
    x = launches.read(written, found.h_pre if reads is None else reads)
    return StreamRead(written, x, *found), mixes


def _mixes(written: Tensor, weights: MhcWeights) -> Tensor:
    mixes = weights.bias.new_empty(weights.bias.shape[0] + 1, written.shape[0])
    for chunk in chunks(written):
        project(written[chunk].flatten(1).to(mixes.dtype), weights.mapping, mixes[:, chunk])
    return mixes


def _coefficients(
    mixes: Tensor, weights: MhcWeights, num_streams: int, options: MhcOptions
) -> StreamCoefficients:
    h_pre = gate(mixes, weights, num_streams, options)
    h_post, h_res = tokens_first(*update_coefficients(mixes, weights, num_streams, options))
    mixing = None if h_res is None else h_res.contiguous()
    return StreamCoefficients(h_pre.t().contiguous(), h_post.contiguous(), mixing)


def update_and_read_backward(
    gradients: StreamRead,
    kept: Kept,
    update: StreamUpdate | None,
    weights: MhcWeights,
    options: MhcOptions,
    *,
    reads: bool,
) -> tuple[StreamUpdate, MhcWeights, Tensor]:
    """As the contract says; without an update, the record has the streams' gradient alone."""
    streams, h_pre, mixes = kept
    d_streams, d_x = gradients.streams, gradients.x
    d_read = launches.products(d_x, streams, mixes.dtype)
    d_pre = gradients.h_pre if reads else d_read
    d_coefficients = StreamCoefficients(d_pre, gradients.h_post, gradients.h_res)
    if is_fused(streams.shape[1], options):
        carry, d_bias, d_alpha = launches.coefficients_backward(
            mixes, weights, d_coefficients, options
        )
        read = launches.ReadGradient(d_x, h_pre, carry, weights.mapping, streams)
        before, d_mapping = launches.streams_backward(d_streams, read, update, streams)
    else:
        d_logits = _logits_backward(mixes, weights, d_coefficients, options)
        n = streams.shape[1]
        d_mixes = mixes_backward(d_logits, mixes, weights, n, options.eps)
        d_bias, d_alpha = bias_and_alpha_backward(d_logits, mixes, weights, n, options.eps)
        d_streams, d_mapping = _through_projection(d_streams, streams, d_mixes, weights)
        read = launches.ReadGradient(d_x, h_pre)
        before, _ = launches.streams_backward(d_streams, read, update, streams)
    return before, MhcWeights(d_mapping, d_bias, d_alpha), d_read


def _logits_backward(
    mixes: Tensor, weights: MhcWeights, gradients: StreamCoefficients, options: MhcOptions
) -> Tensor:
    d_pre, d_post, d_res = gradients
    d_others = update_coefficients_backward(mixes, *tokens_last(d_post, d_res), weights, options)
    slopes = gate_slopes(mixes, weights, d_pre.shape[1], options)
    return torch.cat((slopes * d_pre.t(), d_others))


def _through_projection(
    gradient: Tensor, streams: Tensor, d_mixes: Tensor, weights: MhcWeights
) -> tuple[Tensor, Tensor]:
    """The gradient of the streams with the share of the projection, and that of the mapping."""
    total = torch.empty_like(gradient, dtype=d_mixes.dtype)
    d_mapping = torch.zeros_like(weights.mapping)
    for chunk in chunks(streams):
        flat, part = streams[chunk].flatten(1).to(d_mixes.dtype), d_mixes[:, chunk]
        d_mapping.addmm_(part[:-1], flat)
        share = torch.addmm(flat * part[-1].unsqueeze(1), part[:-1].t(), weights.mapping)
        total[chunk] = share.view_as(total[chunk]).add_(gradient[chunk])
    return total, d_mapping
