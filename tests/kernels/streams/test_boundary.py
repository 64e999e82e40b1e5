# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The boundary of two mHC sublayers in plain PyTorch: one step of autograd, equal to its parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.functional import MhcOptions, MhcWeights, StreamUpdate
from megatron_residuals.kernels.streams.pytorch import passes
from megatron_residuals.testing import assert_close
from tests.kernels.streams.boundary_case import BoundaryCase, errors

CASES = [
    BoundaryCase(n, 7, (2, 3), convention, updates)
    for n in (1, 2, 3, 4, 8)
    for convention in ("paper", "dsv4")
    for updates in (True, False)
]
CASES += [BoundaryCase(4, 100, (5,)), BoundaryCase(2, 7, (3, 0)), BoundaryCase(4, 7, (2, 2, 3))]
CASES += [BoundaryCase(4, 9, (6,), convention, iterations=1) for convention in ("paper", "dsv4")]
CASES += [
    BoundaryCase(n, 7, (2, 3), "identity", updates, gate_eps=1e-3)
    for n, updates in ((1, True), (4, True), (4, False), (8, True))
]
CASES += [
    BoundaryCase(n, 7, (2, 3), convention, updates)
    for n, convention, updates in (
        (1, "permutations", True),
        (3, "permutations", True),
        (4, "permutations", False),
        (1, "kronecker", True),
        (4, "kronecker", True),
        (6, "kronecker", False),
    )
]
CASES += [
    BoundaryCase(n, 7, (2, 3), convention, updates, reads=True)
    for n, convention, updates in ((1, "paper", True), (4, "dsv4", True), (3, "paper", False))
]
FEW = [BoundaryCase(4, 7, (2, 3)), BoundaryCase(4, 7, (2, 3), "dsv4", False)]
FEW += [BoundaryCase(3, 7, (2, 3), "identity")]

every_case = pytest.mark.parametrize("case", CASES, ids=str)
few_cases = pytest.mark.parametrize("case", FEW, ids=str)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients_are_those_of_the_reference(
    case: BoundaryCase, dtype: torch.dtype
) -> None:
    tensors = case.tensors(dtype)
    values, gradients = case.gradients(case.run, tensors, dtype)
    expected, expected_gradients = case.gradients(case.reference, tensors, dtype)
    for mine, theirs in zip(values, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert_close(mine, theirs, dtype=dtype, kind="same_math")
    bound = {torch.float64: 1e-13, torch.float32: 1e-5}[dtype]
    assert max(errors(gradients, expected_gradients), default=0.0) <= bound


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_activations_are_rounded_where_they_are_stored_and_nowhere_else(
    case: BoundaryCase, dtype: torch.dtype
) -> None:
    tensors = case.tensors(dtype)
    values, gradients = case.gradients(case.run, tensors, dtype)
    wide = [tensor.double() for tensor in tensors]
    exact = case.gradients(case.rounding_reference(dtype), wide, dtype)
    for mine, theirs in zip((*values, *gradients), (*exact[0], *exact[1]), strict=True):
        if mine is None or theirs is None or theirs.numel() == 0:
            assert mine is None or mine.numel() == 0
            continue
        half_unit = torch.finfo(mine.dtype).eps / 2 * theirs.abs()
        noise = 1e-5 * float(theirs.abs().max()) + torch.finfo(mine.dtype).smallest_normal
        assert ((mine.double() - theirs).abs() <= half_unit + noise).all()


@few_cases
def test_chunks_of_tokens_do_not_show(case: BoundaryCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """37 tokens, worked on all at once, and sixteen at a time."""
    case = BoundaryCase(case.n, case.d, (37,), case.convention, case.updates)
    tensors = case.tensors(torch.float64)
    values, gradients = case.gradients(case.run, tensors, torch.float64)
    monkeypatch.setattr(passes, "CACHED_NUMBERS", 1)
    again, again_gradients = case.gradients(case.run, tensors, torch.float64)
    assert max(errors([*again, *again_gradients], [*values, *gradients])) <= 1e-14


@few_cases
@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
def test_autocast_around_either_pass_changes_nothing(case: BoundaryCase, inside: str) -> None:
    tensors = case.tensors(torch.float32)
    expected = case.gradients(case.run, tensors, torch.float32)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16, enabled=inside != "backward"):
        found = case.run(*leaves)
    values = case.trained(found)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside != "forward"):
        torch.autograd.backward(values, case.cotangents(values, torch.float32))
    for mine, theirs in zip((*values, found.h_pre), expected[0], strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    for leaf, gradient in zip(leaves, expected[1], strict=True):
        assert (leaf.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(leaf.grad, gradient)


def test_autocast_around_the_backward_of_coefficients_changes_nothing() -> None:
    """Their backward runs the reference again, whose products must stay float32."""
    case = FEW[0]
    streams, *_, mapping, bias, alpha = case.tensors(torch.float32)
    found = []
    for enabled in (False, True):
        leaf = mapping.clone().requires_grad_()
        weights, options = MhcWeights(leaf, bias, alpha), MhcOptions("paper", 3, 1e-6)
        value = kernels.mhc_coefficients(streams, weights, options).h_res
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@few_cases
def test_frozen_inputs_get_no_gradient_and_change_nobody_elses(case: BoundaryCase) -> None:
    tensors = case.tensors(torch.float64)
    _, full = case.gradients(case.run, tensors, torch.float64)
    for frozen in range(len(tensors)):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(tensors)]
        found = case.run(*leaves)
        values = case.trained(found)
        torch.autograd.backward(values, case.cotangents(values, torch.float64))
        assert leaves[frozen].grad is None
        for i, gradient in enumerate(full):
            if i != frozen and gradient is not None:
                assert torch.equal(leaves[i].grad, gradient)


@few_cases
def test_hooks_on_every_edge_see_the_true_partial_gradient(case: BoundaryCase) -> None:
    """Two boundaries in a row: no gradient takes a way of its own around autograd."""
    tensors, seen = case.tensors(torch.float64), []
    first = BoundaryCase(case.n, case.d, case.lead, case.convention)
    for function in (first.run, first.reference):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        between = function(*leaves)
        # the streams as they go on from here: they are also what x and the others come from
        onward = between.streams.view_as(between.streams)
        found: list[Tensor] = []
        for value in (onward, *case.trained(between)[1:]):
            value.register_hook(found.append)
        update = StreamUpdate(onward, between.x.sin(), between.h_post, between.h_res)
        package = kernels if function == first.run else functional
        options = MhcOptions(case.convention, 3, 1e-2)
        after = package.update_and_read(update, MhcWeights(*leaves[4:]), options)
        values = case.trained(after)
        torch.autograd.backward(values, case.cotangents(values, torch.float64))
        seen.append(sorted(found, key=lambda gradient: tuple(gradient.shape)))
    assert len(seen[0]) == 3 + case.options.mixes and max(errors(*seen)) <= 1e-12


@few_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_are_references_and_a_few_numbers_per_token(
    case: BoundaryCase, dtype: torch.dtype
) -> None:
    """h_pre, the projections and the mean square; besides what goes in and the streams."""
    leaves = [tensor.requires_grad_() for tensor in case.tensors(dtype)]
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = case.run(*leaves)
    own = {t.untyped_storage().data_ptr() for t in (*leaves, found.streams)}
    extra = {t.untyped_storage().data_ptr(): t for t in kept}
    numbers = sum(
        t.untyped_storage().nbytes() // t.element_size() for p, t in extra.items() if p not in own
    )
    n, tokens = case.n, case.lead[0] * case.lead[1]
    assert numbers == tokens * (n + sum(case.options.sizes(n)) + 1)
    assert not [v for v in vars(found.x.grad_fn).values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("convention", ["paper", "dsv4"])
@pytest.mark.parametrize("updates", [True, False])
def test_gradcheck(convention: str, updates: bool) -> None:
    case = BoundaryCase(2, 3, (2,), convention, updates, iterations=3)
    tensors = case.tensors(torch.float64)
    used = range(len(tensors)) if updates else (0, 4, 5, 6)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        inputs = list(tensors)
        for i, leaf in zip(used, leaves, strict=True):
            inputs[i] = leaf
        found = case.run(*inputs)
        return found.streams, found.x, found.h_post, found.h_res

    assert torch.autograd.gradcheck(function, [tensors[i].requires_grad_() for i in used])


@pytest.mark.parametrize("convention", ["paper", "dsv4"])
@pytest.mark.parametrize("size", [30.0, 300.0, 1e5])
def test_any_finite_logits_give_finite_values_and_gradients(convention: str, size: float) -> None:
    case = BoundaryCase(4, 8, (50,), convention, iterations=20, eps=1e-6)
    tensors = case.tensors(torch.float32)
    tensors[4] = tensors[4] * size
    values, gradients = case.gradients(case.run, tensors, torch.float32)
    expected, _ = case.gradients(case.reference, [t.double() for t in tensors], torch.float32)
    assert all(torch.isfinite(value).all() for value in (*values, *gradients) if value is not None)
    bound = 1e-6 * size  # the logits themselves have this error in float32
    assert max(errors(list(values), list(expected))) <= max(bound, 1e-5)


def test_an_unknown_convention_or_backend_is_refused() -> None:
    tensors = FEW[0].tensors(torch.float32)
    with pytest.raises(ValueError, match="allowed: paper, dsv4"):
        BoundaryCase(4, 7, (2, 3), "rows first").run(*tensors)
    with pytest.raises(ValueError, match="allowed: auto, torch, triton"):
        FEW[0].run(*tensors, backend="cuda")
