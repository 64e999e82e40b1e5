# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of permutations and their Kronecker products with the tokens last, and their gradient.

Weights are picked and summed rather than multiplied with matrices of zeros and ones, so that sums
of rows and columns are one to the last bits whatever precision matrix products have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.functional.permutations import permutation_matrices


@functools.cache
def _places(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each entry of a matrix the permutations with a one there, and the other way round."""
    ones = permutation_matrices(size).flatten(1).bool()  # [size!, size^2]
    here = ones.t().nonzero()[:, 1].view(size * size, -1)
    there = ones.nonzero()[:, 1].view(-1, size)
    return here.to(device), there.to(device)


def _weights(logits: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = logits.split([math.factorial(size) for size in sizes])
    return [torch.softmax(part, 0) for part in parts]


def _factor(weights: Tensor, size: int) -> Tensor:
    here, _ = _places(size, weights.device)
    return weights[here].sum(1).view(size, size, -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    size = left.shape[0] * right.shape[0]
    return (left[:, None, :, None] * right[None, :, None, :]).reshape(size, size, -1)


def mix(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """H_res [n, n, T] as [new, old] from the logits of all factors, one below the other."""
    pairs = zip(_weights(logits, sizes), sizes, strict=True)
    found = [_factor(weights, size) for weights, size in pairs]
    return functools.reduce(_product, found, logits.new_ones(1, 1, logits.shape[1]))


def mix_backward(logits: Tensor, gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient of the logits from that of ``mix`` [n, n, T]."""
    all_weights = _weights(logits, sizes)
    found = [_factor(weights, size) for weights, size in zip(all_weights, sizes, strict=True)]
    result = torch.empty_like(logits)
    first = logits.shape[0]
    for k in reversed(range(len(found))):
        weights, (_, there) = all_weights[k], _places(sizes[k], logits.device)
        one = logits.new_ones(1, 1, logits.shape[1])
        left = functools.reduce(_product, found[:k], one)
        a, b = left.shape[0], sizes[k]
        pairs = gradient.view(a, b, a, b, -1)
        d_factor = (pairs * left[:, None, :, None]).sum((0, 2)).flatten(0, 1)
        gradient = (pairs * found[k][None, :, None, :]).sum((1, 3))
        d_weights = d_factor[there].sum(1)
        inner = (weights * d_weights).sum(0)
        first -= weights.shape[0]
        torch.mul(weights, d_weights - inner, out=result[first : first + weights.shape[0]])
    return result
