# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn in both spellings: values, orientation, gradients, and logits far out of exp's range."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_residuals.functional import sinkhorn_dsv4, sinkhorn_paper
from megatron_residuals.testing import assert_close
from tests.functional import loops

SIZES = (1, 2, 4, 7)
ITERATIONS = (1, 2, 20)
SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "paper": sinkhorn_paper,
    "dsv4": functools.partial(sinkhorn_dsv4, eps=1e-6),
}

close = functools.partial(assert_close, dtype=torch.float64, kind="same_math")


def entrywise(
    function: Callable[..., loops.Matrix], logits: Tensor, *args: object, **more: object
) -> Tensor:
    """A function of one matrix in plain floats, over all leading dimensions."""
    matrices = logits.reshape(-1, *logits.shape[-2:]).tolist()
    results = [function(matrix, *args, **more) for matrix in matrices]
    return torch.tensor(results, dtype=torch.float64).view_as(logits)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("n", SIZES)
def test_the_paper_divides_columns_then_rows_of_the_exponentials(n: int, iterations: int) -> None:
    logits = loops.random_tensors(n)(2, 3, n, n)
    expected = entrywise(loops.sinkhorn_paper, logits, iterations)
    close(sinkhorn_paper(logits, iterations=iterations), expected)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("n", SIZES)
def test_dsv4_adds_eps_after_the_softmax_and_in_every_division(
    n: int, iterations: int, eps: float
) -> None:
    logits = loops.random_tensors(n)(2, 3, n, n)
    expected = entrywise(loops.sinkhorn_dsv4, logits, iterations, eps)
    close(sinkhorn_dsv4(logits, iterations=iterations, eps=eps), expected)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("n", SIZES)
def test_the_spellings_agree_after_transposing_logits_and_result(n: int, iterations: int) -> None:
    logits = loops.random_tensors(10 + n)(50, n, n)
    paper = sinkhorn_paper(logits, iterations=iterations)
    turned = logits.transpose(-1, -2)
    exact = sinkhorn_dsv4(turned, iterations=iterations, eps=1e-30).transpose(-1, -2)
    released = sinkhorn_dsv4(turned, iterations=iterations, eps=1e-6).transpose(-1, -2)
    close(exact, paper)
    assert (released - paper).abs().max() <= 1e-5
    if iterations == 1 and n > 1:
        # Without the transposition they differ, less and less with more iterations.
        assert (sinkhorn_dsv4(logits, iterations=iterations, eps=1e-30) - paper).abs().max() > 1e-2


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_the_paper_ends_with_exact_rows_and_dsv4_with_columns_short_by_eps(iterations: int) -> None:
    logits = 2 * loops.random_tensors(3)(200, 4, 4)
    paper = sinkhorn_paper(logits, iterations=iterations)
    comb = sinkhorn_dsv4(logits, iterations=iterations, eps=1e-6)
    assert (paper.sum(-1) - 1).abs().max() <= 1e-14
    assert 0 < (1 - comb.sum(-2)).min() and (1 - comb.sum(-2)).max() <= 1e-4
    assert (paper > 0).all() and (comb > 0).all()
    # The side that is not divided last is off by more than rounding.
    assert (paper.sum(-2) - 1).abs().max() > 1e-6
    assert (comb.sum(-1) - 1).abs().max() > 1e-5


def test_more_iterations_bring_the_columns_of_the_paper_closer_to_one() -> None:
    logits = loops.random_tensors(4)(200, 4, 4)
    errors = [
        (sinkhorn_paper(logits, iterations=count).sum(-2) - 1).abs().mean()
        for count in (1, 2, 5, 20, 100)
    ]
    assert all(later < 0.8 * earlier for earlier, later in zip(errors, errors[1:], strict=False))
    assert errors[-1] <= 1e-5


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("n", [2, 4, 7])
def test_logits_like_a_permutation_give_that_permutation(n: int, spelling: str) -> None:
    """A cycle, so that the transpose is another matrix (for n > 2)."""
    permutation = torch.eye(n, dtype=torch.float64).roll(1, dims=1)
    permutation[:, 0], permutation[:, -1] = permutation[:, -1].clone(), permutation[:, 0].clone()
    result = SPELLINGS[spelling](40 * permutation, iterations=20)
    assert (result - permutation).abs().max() <= 1e-5


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_leading_dimensions_are_independent_of_each_other(spelling: str) -> None:
    logits = loops.random_tensors(5)(3, 2, 4, 4)
    together = SPELLINGS[spelling](logits, iterations=20)
    for index in ((0, 0), (1, 1), (2, 0)):
        close(together[index], SPELLINGS[spelling](logits[index], iterations=20))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("n", "iterations"), [(1, 3), (2, 1), (3, 2), (4, 20)])
def test_gradcheck(n: int, iterations: int, spelling: str) -> None:
    draw = loops.random_tensors(6)
    logits, cotangent = draw(2, n, n).requires_grad_(), draw(2, n, n)

    def projected(logits: Tensor) -> Tensor:
        return (SPELLINGS[spelling](logits, iterations=iterations) * cotangent).sum((-1, -2))

    assert torch.autograd.gradcheck(projected, logits)
    assert torch.autograd.gradcheck(
        functools.partial(SPELLINGS[spelling], iterations=iterations), logits
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("n", "iterations"), [(1, 20), (2, 20), (4, 1), (4, 20), (7, 3)])
def test_the_gradient_is_the_one_derived_by_hand(n: int, iterations: int, spelling: str) -> None:
    draw = loops.random_tensors(7)
    logits, cotangent = draw(n, n).requires_grad_(), draw(n, n)
    result = SPELLINGS[spelling](logits, iterations=iterations)
    (gradient,) = torch.autograd.grad(result, logits, cotangent)
    if spelling == "paper":
        expected = loops.sinkhorn_paper_backward(logits.tolist(), iterations, cotangent.tolist())
    else:
        expected = loops.sinkhorn_dsv4_backward(
            logits.tolist(), iterations, 1e-6, cotangent.tolist()
        )
    close(gradient, torch.tensor(expected, dtype=torch.float64))


def far_logits(n: int) -> Tensor:
    """float32 logits of about +-1e4: random signs, one row low, one column low, all low."""
    draw = loops.random_tensors(8)
    logits = 1e4 * draw(40, n, n).sign()
    logits[10:20, n - 1] = -1e4
    logits[20:30, :, 0] = -1e4
    logits[30] = -1e4
    return (logits + draw(40, n, n)).float()


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_far_logits_give_finite_values_and_gradients_in_float32(
    n: int, spelling: str, iterations: int
) -> None:
    logits = far_logits(n).requires_grad_()
    result = SPELLINGS[spelling](logits, iterations=iterations)
    cotangent = loops.random_tensors(9)(*logits.shape).float()
    (gradient,) = torch.autograd.grad(result, logits, cotangent)
    assert result.isfinite().all() and gradient.isfinite().all()
    assert (result >= 0).all() and (result <= 1 + 1e-6).all()


@pytest.mark.parametrize("iterations", ITERATIONS)
def test_rows_of_the_paper_sum_to_one_for_far_logits_too(iterations: int) -> None:
    """log-sum-exp of numbers near -2e4, subtracted, loses the log(n) it was computed for."""
    result = sinkhorn_paper(far_logits(4), iterations=iterations)
    assert (result.sum(-1) - 1).abs().max() <= 1e-6
