# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Doubly stochastic by construction: sums of permutations, and their Kronecker products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def permutation_matrices(size: int) -> Tensor:
    """All of them as [new, old], the identity first.    -> [size!, size, size], float64"""
    orders = torch.tensor(list(itertools.permutations(range(size))))
    return torch.nn.functional.one_hot(orders, size).to(torch.float64)


def mix_permutations(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """H = U_1 x U_2 x …, U_k = sum_p softmax(z_k)_p P_p.    [..., sum_k size_k!] -> [..., n, n]

    A weighted sum of permutations is doubly stochastic (mHC-lite, arXiv 2601.05732, for one factor
    of n streams), and so is a Kronecker product of such sums (KromHC, arXiv 2601.21579, for several
    small ones, of which the first strides most).
    """
    matrix = logits.new_ones(*logits.shape[:-1], 1, 1)
    parts = logits.split([math.factorial(size) for size in sizes], dim=-1)
    for size, part in zip(sizes, parts, strict=True):
        weights = torch.softmax(part, dim=-1)[..., None, None]
        factor = (weights * permutation_matrices(size).to(weights)).sum(-3)
        product = matrix[..., :, None, :, None] * factor[..., None, :, None, :]
        matrix = product.flatten(-4, -3).flatten(-2)
    return matrix
