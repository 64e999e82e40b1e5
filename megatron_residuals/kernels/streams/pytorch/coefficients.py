# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Coefficients of mHC from the projected streams and back, with the tokens last.

For n streams and K coefficients: mixes [K + 1, T], the projections and below them the sum of
squares; h_pre and h_post [n, T]; h_res [n, n, T] as [new, old], or None. Four numbers in a row
leave vector units idle, many tokens do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_residuals.functional.streams import MhcOptions, MhcWeights
from megatron_residuals.kernels.streams.pytorch import permutations
from megatron_residuals.kernels.streams.pytorch.sinkhorn import sinkhorn, sinkhorn_backward


def tokens_last(h_post: Tensor, h_res: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[T, n] and [T, n, n] -> [n, T] and [n, n, T]."""
    return h_post.t(), None if h_res is None else h_res.permute(1, 2, 0).contiguous()


def tokens_first(h_post: Tensor, h_res: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Views: the inverse of ``tokens_last``."""
    return h_post.t(), None if h_res is None else h_res.permute(2, 0, 1)


def rstd_of(mixes: Tensor, size: int, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) of the n d = size numbers of a token.    [K + 1, T] -> [T]"""
    return torch.rsqrt(mixes[-1] / size + eps)


def _logits(mixes: Tensor, weights: MhcWeights, part: int, rows: slice, rstd: Tensor) -> Tensor:
    bias = weights.bias[rows].unsqueeze(-1)
    return torch.addcmul(bias, mixes[rows], rstd * weights.alpha[part])


def _parts(num_streams: int, columns: int) -> tuple[slice, slice, slice]:
    n = num_streams
    return slice(0, n), slice(n, 2 * n), slice(2 * n, columns)


def _oriented(matrix: Tensor, options: MhcOptions) -> Tensor:
    """[n^2, T], or [n, n, T], as projected -> [new, old, T]; its own inverse."""
    if matrix.ndim == 2:
        n = math.isqrt(matrix.shape[0])
        matrix = matrix.view(n, n, -1)
    return matrix.transpose(0, 1).contiguous() if options.is_dsv4 else matrix


def gate(mixes: Tensor, weights: MhcWeights, num_streams: int, options: MhcOptions) -> Tensor:
    """h_pre [n, T]."""
    rstd = rstd_of(mixes, weights.mapping.shape[1], options.eps)
    logits = _logits(mixes, weights, 0, slice(0, num_streams), rstd)
    return logits.sigmoid_().add_(options.step_eps)


def update_coefficients(
    mixes: Tensor, weights: MhcWeights, num_streams: int, options: MhcOptions
) -> tuple[Tensor, Tensor | None]:
    """h_post [n, T] and h_res [n, n, T]."""
    _, post, res = _parts(num_streams, weights.bias.shape[0])
    rstd = rstd_of(mixes, weights.mapping.shape[1], options.eps)
    h_post = _logits(mixes, weights, 1, post, rstd).sigmoid_().mul_(2).add_(options.post_eps)
    if not options.mixes:
        return h_post, None
    logits = _logits(mixes, weights, 2, res, rstd)
    if sizes := options.factors(num_streams):
        return h_post, permutations.mix(logits, sizes)
    return h_post, sinkhorn(_oriented(logits, options), options)


def update_coefficients_backward(
    mixes: Tensor,
    d_post: Tensor,
    d_res: Tensor | None,
    weights: MhcWeights,
    options: MhcOptions,
) -> Tensor:
    """Gradients of the logits of post and res [K - n, T] from those of the coefficients."""
    n, columns = d_post.shape[0], weights.bias.shape[0]
    _, post, res = _parts(n, columns)
    rstd = rstd_of(mixes, weights.mapping.shape[1], options.eps)
    gates = _logits(mixes, weights, 1, post, rstd)
    result = mixes.new_empty(columns - n, mixes.shape[1])
    torch.mul(d_post, torch.sigmoid(gates) * torch.sigmoid(-gates), out=result[:n]).mul_(2)
    if d_res is None:
        return result
    logits = _logits(mixes, weights, 2, res, rstd)
    if sizes := options.factors(n):
        result[n:] = permutations.mix_backward(logits, d_res, sizes)
        return result
    d_logits = sinkhorn_backward(_oriented(logits, options), d_res, options)
    result[n:].view(n, n, -1).copy_(_oriented(d_logits, options))
    return result


def gate_slopes(
    mixes: Tensor, weights: MhcWeights, num_streams: int, options: MhcOptions
) -> Tensor:
    """The derivative of h_pre with respect to its logits [n, T].

    From the logits: h_pre itself has lost what a saturated gate still has.
    """
    rstd = rstd_of(mixes, weights.mapping.shape[1], options.eps)
    logits = _logits(mixes, weights, 0, slice(0, num_streams), rstd)
    return torch.sigmoid(logits).mul_(torch.sigmoid(-logits))


def mixes_backward(
    d_logits: Tensor, mixes: Tensor, weights: MhcWeights, num_streams: int, eps: float
) -> Tensor:
    """Through z = alpha rstd m + bias, from d_logits [K, T].

    -> [K + 1, T], of which the last row is twice the gradient of the sum of squares.
    """
    size = weights.mapping.shape[1]
    rstd = rstd_of(mixes, size, eps)
    result = torch.empty_like(mixes)
    parts = _parts(num_streams, d_logits.shape[0])
    for alpha, rows in zip(weights.alpha, parts, strict=False):  # an alpha for each part there is
        torch.mul(d_logits[rows], alpha, out=result[rows])
    d_rstd = (result[:-1] * mixes[:-1]).sum(0)
    result[:-1].mul_(rstd)
    torch.mul(d_rstd, rstd.pow(3), out=result[-1]).mul_(-1 / size)
    return result


def bias_and_alpha_backward(
    d_logits: Tensor, mixes: Tensor, weights: MhcWeights, num_streams: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of bias [K] and of the alphas, summed over all tokens."""
    rstd = rstd_of(mixes, weights.mapping.shape[1], eps)
    by_logit = (d_logits * mixes[:-1]).mv(rstd)
    parts = _parts(num_streams, d_logits.shape[0])[: weights.alpha.shape[0]]
    return d_logits.sum(1), torch.stack([by_logit[rows].sum() for rows in parts])
