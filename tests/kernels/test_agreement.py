# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The trained mathematics computes what its reference computes, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_residuals.testing import assert_close
from tests.kernels.cases import Case, cases, source_case, stream_cases

ORDINARY = {case.name: case for case in cases(7, 2, 3)}
ODD_SHAPES = [(100, 5), (7,), (7, 2, 0, 3)]  # d, then the leading dimensions; one has no token
ODD = {
    f"{case.name}-{shape}": case for shape in ODD_SHAPES for case in cases(*shape, streams=(2, 4))
}
ALL = ORDINARY | ODD
TINY = {case.name: case for n in (1, 3) for case in stream_cases(n, 2, 2)}
TINY |= {case.name: case for case in (source_case(1, 2, 2), source_case(3, 2, 2))}

every_case = pytest.mark.parametrize("case", ALL.values(), ids=ALL)
ordinary_cases = pytest.mark.parametrize("case", ORDINARY.values(), ids=ORDINARY)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_forward_is_that_of_the_reference(case: Case, dtype: torch.dtype) -> None:
    """Bit for bit, but for the order in which a read or a write adds up the streams.

    And but for the dot products of a single token, for which processors take different routines.
    """
    tensors = case.tensors(dtype)
    actual, expected = case.kernel(*tensors), case.reference(*tensors)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        one_token = case.name.startswith("sources") and mine.dim() == 1
        if case.name.startswith(("read", "write")) or one_token:
            assert_close(mine, theirs, dtype=dtype, kind="same_math")
        else:
            assert torch.equal(mine, theirs)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_gradients_are_those_of_autograd_through_the_reference(
    case: Case, dtype: torch.dtype
) -> None:
    _, actual = case.gradients(case.kernel, case.tensors(dtype))
    _, expected = case.gradients(case.reference, case.tensors(dtype))
    compare(case, actual, expected, dtype)


def compare(
    case: Case, actual: list[Tensor | None], expected: list[Tensor | None], dtype: torch.dtype
) -> None:
    for name, mine, theirs in zip(case.inputs, actual, expected, strict=True):
        if theirs is None or mine is None:
            # an input that the reference does not use gets no gradient, or zeros
            assert mine is None or not mine.any(), name
            assert theirs is None, name
            continue
        scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        assert_close(mine / scale, theirs / scale, dtype=dtype, kind="same_math", name=name)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_activations_are_exact_up_to_one_rounding(
    case: Case, dtype: torch.dtype
) -> None:
    """Against float64 with the same inputs and cotangents: half a unit of the last place of the
    gradient's own dtype, and the noise of float32."""
    tensors = case.tensors(dtype)
    values, actual = case.gradients(case.kernel, tensors)
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    cotangents = [cotangent.double() for cotangent in case.cotangents(values)]
    torch.autograd.backward(case.reference(*leaves), cotangents)
    for name, mine, leaf, tensor in zip(case.inputs, actual, leaves, tensors, strict=True):
        if leaf.grad is None or mine is None:
            assert mine is None or not mine.any(), name
            continue
        assert mine.dtype == tensor.dtype
        exact = leaf.grad
        noise = 1e-5 * float(exact.abs().max()) if exact.numel() else 0.0
        rounding = torch.finfo(mine.dtype).eps / 2 * exact.abs()
        tiny = torch.finfo(mine.dtype).smallest_normal
        assert ((mine.double() - exact).abs() <= rounding + noise + tiny).all(), name


@ordinary_cases
def test_frozen_inputs_get_no_gradient_and_change_nobody_elses(case: Case) -> None:
    tensors = case.tensors(torch.float64)
    _, full = case.gradients(case.kernel, tensors)
    count = len(tensors)
    for frozen in range(count):
        trained = tuple(i for i in range(count) if i != frozen)
        _, gradients = case.gradients(case.kernel, tensors, trained=trained)
        assert gradients[frozen] is None
        assert_same(gradients, full, trained)


@ordinary_cases
def test_a_single_trained_input_gets_the_gradient_it_gets_among_others(case: Case) -> None:
    """One static matrix of HC alone: the other coefficients then have no gradient at all."""
    tensors = case.tensors(torch.float64)
    _, full = case.gradients(case.kernel, tensors)
    for trained in range(len(tensors)):
        _, gradients = case.gradients(case.kernel, tensors, trained=(trained,))
        assert [i for i, grad in enumerate(gradients) if grad is not None] in ([], [trained])
        assert_same(gradients, full, (trained,))


def assert_same(
    actual: list[Tensor | None], expected: list[Tensor | None], indices: tuple[int, ...]
) -> None:
    for i in indices:
        mine, theirs = actual[i], expected[i]
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)


@ordinary_cases
def test_a_value_that_nobody_used_counts_as_a_gradient_of_zero(case: Case) -> None:
    tensors = case.tensors(torch.float64)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    reference = [tensor.detach().requires_grad_() for tensor in tensors]
    for function, inputs in ((case.kernel, leaves), (case.reference, reference)):
        value = function(*inputs)[-1]
        value.backward(case.cotangents((value,))[0])
    compare(case, [leaf.grad for leaf in leaves], [leaf.grad for leaf in reference], torch.float64)


@ordinary_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_neither_the_forward_nor_the_gradients(
    case: Case, dtype: torch.dtype
) -> None:
    tensors = case.tensors(dtype)
    values, expected = case.gradients(case.kernel, tensors)
    inside, actual = case.gradients(case.kernel, tensors, autocast=True)
    for mine, theirs in zip(inside, values, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert_same(actual, expected, tuple(range(len(tensors))))


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_gradcheck(case: Case) -> None:
    leaves = [tensor.requires_grad_() for tensor in case.tensors(torch.float64)]
    assert torch.autograd.gradcheck(case.kernel, leaves)


@ordinary_cases
def test_strided_inputs_give_the_same(case: Case) -> None:
    """Streams and sources may come as views, such as a slice of what a pipeline received."""
    tensors = case.tensors(torch.float64)
    strided = [torch.stack((tensor, tensor), -1)[..., 0] for tensor in tensors]
    assert not strided[0].is_contiguous()
    values, expected = case.gradients(case.kernel, tensors)
    mine, actual = case.gradients(case.kernel, strided)
    for value, other in zip(mine, values, strict=True):
        assert_close(value, other, dtype=torch.float64, kind="same_math")
    compare(case, actual, expected, torch.float64)


def test_sources_with_squares_close_to_the_end_of_float32_are_read_and_trained_exactly() -> None:
    """Beyond it they are read as by the reference, as if their keys were zero."""
    case = source_case(3, 7, 2)
    query, gain, *sources = case.tensors(torch.float32)
    large, larger = ([query, gain, *[source * size for source in sources]] for size in (1e18, 1e20))
    values, actual = case.gradients(case.kernel, large)
    exact = [tensor.double() for tensor in large]
    expected, gradients = case.gradients(case.reference, exact)
    for mine, theirs in zip([*values, *actual], [*expected, *gradients], strict=True):
        assert mine is not None and theirs is not None
        scale = theirs.abs().max()
        assert_close(mine.double() / scale, theirs / scale, dtype=torch.float32, kind="same_math")
    assert torch.equal(*case.kernel(*larger), *case.reference(*larger))
