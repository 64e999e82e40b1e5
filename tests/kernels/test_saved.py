# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps: references to inputs and a few float32 numbers per token, nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.mechanisms.sources.module import DepthAttention
from megatron_residuals.modules import SourceState
from tests.functional.loops import random_tensors
from tests.kernels.cases import Case, cases, stream_cases

LEAD = (5, 3)
CASES = {case.name: case for case in cases(64, *LEAD, streams=(1, 4))}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def kept_for_backward(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and all tensors that went into autograd's memory during the forward."""
    leaves = [tensor.requires_grad_() for tensor in case.tensors(dtype)]
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        values = case.kernel(*leaves)
    for value in values:
        # a tensor on the node itself would escape the hooks
        attributes = getattr(value.grad_fn, "__dict__", {})
        assert not [each for each in attributes.values() if isinstance(each, Tensor)]
    return leaves, kept


def storages(tensors: list[Tensor]) -> dict[int, Tensor]:
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


@every_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_besides_references_only_the_announced_numbers_per_token_are_kept(
    case: Case, dtype: torch.dtype
) -> None:
    leaves, kept = kept_for_backward(case, dtype)
    own, tokens = storages(leaves), LEAD[0] * LEAD[1]
    extra = [tensor for pointer, tensor in storages(kept).items() if pointer not in own]
    numbers = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in extra)
    assert numbers == case.kept_per_token * tokens
    assert {tensor.dtype for tensor in extra} <= {torch.promote_types(dtype, torch.float32)}
    # and what is kept of an input is the input: its memory, its dtype, once
    for tensor in kept:
        owner = own.get(tensor.untyped_storage().data_ptr())
        assert owner is None or tensor.dtype == owner.dtype


@every_case
def test_the_reference_keeps_more(case: Case) -> None:
    """Else the test above could not fail, nor would the kernels be worth having."""
    if case.name.startswith("hc-static"):
        pytest.skip("static coefficients are views of parameters in both")
    _, lean = kept_for_backward(case, torch.bfloat16)
    _, full = kept_for_backward(dataclasses.replace(case, kernel=case.reference), torch.bfloat16)
    assert nbytes(full) > nbytes(lean)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in storages(tensors).values())


@pytest.mark.parametrize("convention", ["paper", "dsv4"])
def test_more_sinkhorn_iterations_keep_nothing_more(convention: str) -> None:
    (case,) = (each for each in stream_cases(4, 16, *LEAD) if each.name == f"mhc-{convention}")
    sizes = []
    for iterations in (1, 20):
        options = functional.MhcOptions(convention, iterations, 1e-6)

        def kernel(
            streams: Tensor, *weights: Tensor, options: functional.MhcOptions = options
        ) -> tuple[Tensor, ...]:
            return kernels.mhc_coefficients(streams, functional.MhcWeights(*weights), options)

        _, kept = kept_for_backward(dataclasses.replace(case, kernel=kernel), torch.float32)
        sizes.append(nbytes(kept))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_readers_keep_each_source_once(dtype: torch.dtype) -> None:
    """m sources cost m·d whatever the number of readers, which add two numbers per source."""
    d, readers, draw = 64, 7, random_tensors(3)
    leaves = [draw(*LEAD, d).to(dtype).requires_grad_() for _ in range(4)]
    state = SourceState.of(leaves[:-1], leaves[-1])
    modules = [DepthAttention(d, opens_block=False, eps=1e-6) for _ in range(readers)]
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for module in modules:
            module.read(state)
    parameters = storages([p for module in modules for p in module.parameters()])
    found = {key: t for key, t in storages(kept).items() if key not in parameters}
    large = {key for key, tensor in found.items() if tensor.numel() >= leaves[0].numel()}
    assert large == set(storages(leaves))
    wide = torch.promote_types(dtype, torch.float32).itemsize
    scalars = readers * 2 * len(leaves) * LEAD[0] * LEAD[1] * wide
    sources = len(leaves) * leaves[0].numel() * dtype.itemsize
    assert nbytes(list(found.values())) == sources + scalars


def test_no_gradient_no_memory() -> None:
    """Without gradients, and in evaluation, the values are the same and nothing is kept."""
    for case in CASES.values():
        tensors = case.tensors(torch.bfloat16)
        assert all(value.grad_fn is None for value in case.kernel(*tensors))
        leaves = [tensor.requires_grad_() for tensor in case.tensors(torch.bfloat16)]
        with torch.no_grad():
            values = case.kernel(*leaves)
        assert all(value.grad_fn is None for value in values)


def test_kernels_and_references_have_the_same_names_and_parameters() -> None:
    import inspect

    for name in set(kernels.__all__) & set(functional.__all__):
        lean = inspect.signature(getattr(kernels, name)).parameters
        full = inspect.signature(getattr(functional, name)).parameters
        assert list(full) == [each for each in lean if each not in ("buffers", "backend")], name
    assert set(kernels.__all__) - set(functional.__all__) == {
        "GradientBuffer",
        "buffered",
        "depositing",
    }
