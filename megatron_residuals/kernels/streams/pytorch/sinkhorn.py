# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn iterations with the tokens last, and their exact gradient, in plain PyTorch.

In the orientation [new, old] both conventions normalise columns, then rows, again and again; they
differ in how they start. The first iteration is done on logarithms. After it every sum lies within
[1/n, n] whatever the logits, so that the others can divide. Backward keeps the sums of each step
and gets a matrix from the next one by multiplying again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_residuals.functional.streams import MhcOptions

COLUMNS, ROWS = 0, 1  # the dimension that is summed over


def sinkhorn(logits: Tensor, options: MhcOptions, sums: list[Tensor] | None = None) -> Tensor:
    """H_res [n, n, T] as [new, old] from logits in the same orientation; notes the sums."""
    matrix = _first(logits, options)[-1]
    for step in range(2 * (options.iterations - 1)):
        total = matrix.sum((COLUMNS, ROWS)[step % 2], keepdim=True)
        if options.step_eps:
            total += options.step_eps
        matrix.div_(total)
        if sums is not None:
            sums.append(total)
    return matrix


def sinkhorn_backward(logits: Tensor, gradient: Tensor, options: MhcOptions) -> Tensor:
    """The gradient of the logits [n, n, T] from that of ``sinkhorn``."""
    sums: list[Tensor] = []
    matrix, gradient = sinkhorn(logits, options, sums), gradient.clone()
    product = torch.empty_like(matrix)
    for step in reversed(range(len(sums))):
        torch.mul(gradient, matrix, out=product)
        gradient.sub_(product.sum((COLUMNS, ROWS)[step % 2], keepdim=True)).div_(sums[step])
        matrix.mul_(sums[step])
    *columns, first = _first(logits, options)
    return _first_backward(columns[0], first, gradient, options)


def _first(logits: Tensor, options: MhcOptions) -> tuple[Tensor, Tensor]:
    """The softmax over columns, and the matrix after the first iteration."""
    if options.is_dsv4:
        columns = torch.softmax(logits, COLUMNS)
        raised = columns + options.eps
        return columns, raised / (raised.sum(ROWS, keepdim=True) + options.eps)
    logs = torch.log_softmax(logits, COLUMNS)
    return logs.exp(), torch.softmax(logs, ROWS)


def _first_backward(
    columns: Tensor, matrix: Tensor, gradient: Tensor, options: MhcOptions
) -> Tensor:
    gradient = gradient - (gradient * matrix).sum(ROWS, keepdim=True)
    if options.is_dsv4:
        total = (columns + options.eps).sum(ROWS, keepdim=True) + options.eps
        gradient = gradient / total
        return columns * (gradient - (gradient * columns).sum(COLUMNS, keepdim=True))
    d_logs = matrix * gradient
    return d_logs - columns * d_logs.sum(COLUMNS, keepdim=True)
