# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The boundary of two mHC sublayers as a sequence of launches.

Up to four streams the projection is part of the passes over the planes: 3n + 2 planes forward and
5n + 4 backward. More have too many coefficients for that; their projections are plain matrix
products, and their coefficients those of plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_residuals.kernels.coefficients import (
    MhcWeights,
    bias_and_alpha_backward,
    gate,
    gate_slopes,
    mixes_backward,
    tokens_last,
    update_coefficients,
    update_coefficients_backward,
)
from megatron_residuals.kernels.planes import Update, chunks, project
from megatron_residuals.kernels.planes_backward import Cotangents, Kept
from megatron_residuals.kernels.sinkhorn import MhcOptions
from megatron_residuals.kernels.triton import launches
from megatron_residuals.kernels.triton.tiles import MAX_FUSED_STREAMS

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def mixes_shape(tokens: int, num_streams: int) -> tuple[int, int]:
    """Of what is kept of the projections: as the kernels, or as plain PyTorch have them."""
    columns = 2 * num_streams + num_streams**2
    fused = num_streams <= MAX_FUSED_STREAMS
    return (tokens, columns + 1) if fused else (columns + 1, tokens)


def forward(before: Update | Tensor, weights: MhcWeights, options: MhcOptions) -> Six:
    """Streams written (empty without an update), read, h_pre, h_post, h_res, mixes."""
    update = before if isinstance(before, Update) else None
    streams = before.streams if isinstance(before, Update) else before
    n = streams.shape[1]
    if n <= MAX_FUSED_STREAMS:
        written, partial = launches.write_and_mix(before, weights.mapping)
        h_pre, h_post, h_res, mixes = launches.coefficients(partial, weights, n, options)
    else:
        written = streams if update is None else launches.write(update)
        mixes = _mixes(written, weights)
        h_pre = gate(mixes, weights, n, options).t().contiguous()
        h_post, h_res = update_coefficients(mixes, weights, n, options)
        h_post, h_res = h_post.t().contiguous(), h_res.permute(2, 0, 1).contiguous()
    read = launches.read(written, h_pre)
    written = streams.new_empty(0) if update is None else written
    return written, read, h_pre, h_post, h_res, mixes


def _mixes(written: Tensor, weights: MhcWeights) -> Tensor:
    mixes = weights.bias.new_empty(weights.bias.shape[0] + 1, written.shape[0])
    for chunk in chunks(written):
        project(written[chunk].flatten(1).to(mixes.dtype), weights.mapping, mixes[:, chunk])
    return mixes


def backward(
    cotangents: Cotangents,
    kept: Kept,
    weights: MhcWeights,
    options: MhcOptions,
    update: Update | None,
) -> Seven:
    """Gradients of streams, output, h_post, h_res (three empty without), mapping, bias, alpha."""
    d_written, d_read, d_post, d_res = cotangents
    written, h_pre, mixes = kept
    n = written.shape[1]
    d_pre = launches.products(d_read, written, mixes.dtype)
    if n <= MAX_FUSED_STREAMS:
        carry, d_bias, d_alpha = launches.coefficients_backward(
            mixes, weights, (d_pre, d_post, d_res), options
        )
        read = launches.ReadBackward(d_read, h_pre, carry, weights.mapping, written)
        found = launches.planes_backward(d_written, read, update, written)
        d_mapping = found.d_mapping
    else:
        d_others = update_coefficients_backward(
            mixes, *tokens_last(d_post, d_res), weights, options
        )
        d_logits = torch.cat((gate_slopes(mixes, weights, n, options) * d_pre.t(), d_others))
        d_mixes = mixes_backward(d_logits, mixes, weights, options.eps)
        d_bias, d_alpha = bias_and_alpha_backward(d_logits, mixes, weights, options.eps)
        d_written, d_mapping = _through_projection(d_written, written, d_mixes, weights)
        read = launches.ReadBackward(d_read, h_pre)
        found = launches.planes_backward(d_written, read, update, written)
    return found.d_streams, *found.update, d_mapping, d_bias, d_alpha


def _through_projection(
    d_written: Tensor, written: Tensor, d_mixes: Tensor, weights: MhcWeights
) -> tuple[Tensor, Tensor]:
    """The gradient of the streams with the share of the projection, and that of the mapping."""
    total = torch.empty_like(d_written, dtype=d_mixes.dtype)
    d_mapping = torch.zeros_like(weights.mapping)
    for chunk in chunks(written):
        flat, part = written[chunk].flatten(1).to(d_mixes.dtype), d_mixes[:, chunk]
        d_mapping.addmm_(part[:-1], flat)
        share = torch.addmm(flat * part[-1].unsqueeze(1), part[:-1].t(), weights.mapping)
        total[chunk] = share.view_as(total[chunk]).add_(d_written[chunk])
    return total, d_mapping
