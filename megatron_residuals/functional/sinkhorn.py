# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn-Knopp projection of logits towards doubly stochastic matrices, in both spellings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS, COLUMNS = 1, 0  # the dimension summed over to normalise rows, or columns, of [n, n, tokens]


def sinkhorn_paper(logits: Tensor, *, iterations: int) -> Tensor:
    """H = (T_row o T_column)^iterations (exp(logits)).    logits [..., n, n] -> [..., n, n]

    mHC (arXiv 2512.24880), eq. 9: columns first, rows last, so rows sum to one exactly and columns
    approximately. Runs in the log domain: any finite logits give a finite matrix and gradient,
    also where exp(logits) would under- or overflow.
    """

    def iterate(log_h: Tensor) -> Tensor:
        for _ in range(iterations):
            log_h = torch.log_softmax(log_h, COLUMNS)
            log_h = torch.log_softmax(log_h, ROWS)
        return log_h.exp()

    return _tokens_last(iterate, logits)


def sinkhorn_dsv4(logits: Tensor, *, iterations: int, eps: float) -> Tensor:
    """comb = softmax over rows, then alternating column and row normalisation, columns last.

    logits [..., n, n] -> comb [..., n, n], where comb[i, j] weighs old stream i in new stream j:
    the transpose of the paper's H_res (DeepSeek-V4, arXiv 2606.19348, and its released kernels).
    ``eps`` enters after the softmax and in every division.
    """

    def iterate(values: Tensor) -> Tensor:
        comb = torch.softmax(values, ROWS) + eps
        comb = comb / (comb.sum(COLUMNS, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(ROWS, keepdim=True) + eps)
            comb = comb / (comb.sum(COLUMNS, keepdim=True) + eps)
        return comb

    return _tokens_last(iterate, logits)


def _tokens_last(iterate: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Work on [n, n, tokens]: four numbers in a row leave vector units idle, many do not."""
    size = matrices.shape[-1]
    result = iterate(matrices.reshape(-1, size, size).permute(1, 2, 0).contiguous())
    return result.permute(2, 0, 1).reshape(matrices.shape)
