# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The statistics themselves: pure functions of coefficients and weights, leading dims free."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SATURATED = 0.01  # a sigmoid this near to 0 or 1


def row_gain(h_res: Tensor) -> Tensor:
    """max_j |sum_i h_res[j, i]|: forward Amax gain (mHC, section 3.1).    [..., n, n] -> [...]"""
    return h_res.sum(-1).abs().amax(-1)


def column_gain(h_res: Tensor) -> Tensor:
    """max_i |sum_j h_res[j, i]|: the backward Amax gain.    [..., n, n] -> [...]"""
    return h_res.sum(-2).abs().amax(-1)


def row_error(h_res: Tensor) -> Tensor:
    """max_j |sum_i h_res[j, i] - 1|.    [..., n, n] -> [...]"""
    return (h_res.sum(-1) - 1).abs().amax(-1)


def column_error(h_res: Tensor) -> Tensor:
    """max_i |sum_j h_res[j, i] - 1|.    [..., n, n] -> [...]"""
    return (h_res.sum(-2) - 1).abs().amax(-1)


def mean_diagonal(h_res: Tensor) -> Tensor:
    """sum_i h_res[i, i] / n.    [..., n, n] -> [...]"""
    return h_res.diagonal(dim1=-2, dim2=-1).mean(-1)


def saturated_share(gate: Tensor) -> Tensor:
    """Share of sigmoids within ``SATURATED`` of 0 or 1.    [..., n] -> [...]"""
    ends = (gate < SATURATED) | (gate > 1 - SATURATED)
    return ends.to(gate.dtype).mean(-1)


def mean_cosine(gram: Tensor) -> Tensor:
    """Mean cosine over pairs of different streams, from <x_i, x_j>.    [..., n, n] -> [...]

    One stream is its own copy: 1.
    """
    n = gram.shape[-1]
    if n == 1:
        return torch.ones_like(gram[..., 0, 0])
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = norms.unsqueeze(-1) * norms.unsqueeze(-2)
    cosines = gram / scale.clamp_min(torch.finfo(gram.dtype).tiny)
    off_diagonal = cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)
    return off_diagonal / (n * (n - 1))


def relative_entropy(weights: Tensor) -> Tensor:
    """Entropy over the last dim, over its maximum ln(m).    [..., m] -> [...]; 1 where m is 1"""
    m = weights.shape[-1]
    if m == 1:
        return torch.ones_like(weights[..., 0])
    entropy: Tensor = torch.special.entr(weights).sum(-1)
    return entropy / math.log(m)


def composite_gains(h_res: Tensor) -> tuple[Tensor, Tensor]:
    """Amax gains of the products of mixing matrices over depth, averaged over tokens.

        forward[i]  = mean_t row_gain(H_i ... H_1 H_0)       a signal on its way to sublayer i + 1
        backward[i] = mean_t column_gain(H_{L-1} ... H_i)    a gradient on its way to sublayer i

    Args:
        h_res: [L, tokens, n, n], the first sublayer first (mHC, eq. 4 and section 3.1).

    Returns:
        Two [L]; NaN without tokens.
    """
    forward, backward = [], []
    product = torch.eye(h_res.shape[-1], dtype=h_res.dtype, device=h_res.device)
    for matrix in h_res:
        product = matrix @ product
        forward.append(row_gain(product).mean())
    product = torch.eye(h_res.shape[-1], dtype=h_res.dtype, device=h_res.device)
    for matrix in h_res.flip(0):
        product = product @ matrix
        backward.append(column_gain(product).mean())
    return torch.stack(forward), torch.stack(backward[::-1])
