# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of permutations and their Kronecker products: exact where Sinkhorn is not."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from megatron_residuals import mixing
from megatron_residuals.functional import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamUpdate,
    hc_coefficients,
    mhc_coefficients,
    sinkhorn_paper,
    write_streams,
)
from megatron_residuals.functional.permutations import mix_permutations, permutation_matrices
from megatron_residuals.testing import assert_close
from tests.functional import loops

D = 5
close = functools.partial(assert_close, dtype=torch.float64, kind="same_math")


def worst_sum(matrices: Tensor) -> float:
    """How far a row or column is from one."""
    sums = torch.stack((matrices.sum(-1), matrices.sum(-2)))
    return float((sums - 1).abs().max())


@pytest.mark.parametrize("kind", ["permutations", "kronecker"])
def test_sums_are_one_to_the_last_bits_of_float32_where_twenty_sinkhorn_steps_leave_an_error(
    kind: str,
) -> None:
    n, draw = 4, loops.random_tensors(1)
    logits = 10 * draw(2000, mixing.num_logits(kind, n))
    matrices = mix_permutations(logits.float(), mixing.factors(kind, n))
    assert matrices.dtype == torch.float32 and (matrices >= 0).all()
    assert worst_sum(matrices) <= 8 * torch.finfo(torch.float32).eps
    assert worst_sum(sinkhorn_paper(10 * draw(2000, n, n).float(), iterations=20)) > 1e-2


def test_a_kronecker_product_is_torchs_of_its_factors() -> None:
    sizes, logits = mixing.factors("kronecker", 6), loops.random_tensors(2)(8)
    assert sizes == (2, 3)
    first, second = (
        mix_permutations(part, (size,))
        for part, size in zip(logits.split([2, 6]), sizes, strict=True)
    )
    close(mix_permutations(logits, sizes), torch.kron(first, second))


def test_the_identity_comes_first_and_every_permutation_once() -> None:
    for size in (1, 2, 3, 4):
        matrices = permutation_matrices(size)
        assert torch.equal(matrices[0], torch.eye(size, dtype=torch.float64))
        assert len({tuple(matrix.flatten().tolist()) for matrix in matrices}) == len(matrices)
        assert len(matrices) == math.factorial(size) and worst_sum(matrices) == 0


@pytest.mark.parametrize("chosen", [1, 9, 23])
def test_with_one_permutation_mhc_mixes_as_hc_does_with_that_matrix(chosen: int) -> None:
    n, options = 4, MhcOptions("permutations", 1, 1e-20)
    columns, streams = sum(options.sizes(n)), loops.random_tensors(3)(6, n, D)
    bias = torch.zeros(columns, dtype=torch.float64)
    bias[2 * n + chosen] = 100.0
    mapping = torch.zeros(columns, n * D, dtype=torch.float64)
    weights = MhcWeights(mapping, bias, torch.ones(3, dtype=torch.float64))
    mine = mhc_coefficients(streams, weights, options)
    matrix = permutation_matrices(n)[chosen]
    static = StreamCoefficients(mine.h_pre[0], mine.h_post[0], matrix)
    theirs = hc_coefficients(streams, static, None, None, norm="rmsnorm", eps=1e-5)
    output = loops.random_tensors(4)(6, D)
    written = [
        write_streams(StreamUpdate(streams, output, each.h_post, each.h_res))
        for each in (mine, theirs)
    ]
    close(*written)


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 3)], ids=str)
def test_gradcheck(sizes: tuple[int, ...]) -> None:
    logits = loops.random_tensors(5)(2, sum(map(math.factorial, sizes))).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: mix_permutations(z, sizes), logits)
