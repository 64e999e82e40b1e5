# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads in two phases: the same function as one read, lean, and the same whoever else reads."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.testing import assert_close
from tests.functional.loops import random_tensors
from tests.kernels.depth_attention.block import EPS, Block, gradients

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERY_SHAPE = [(1, 1), (1, 4), (2, 1), (3, 4), (9, 2)]  # sources, readers

every_shape = pytest.mark.parametrize(("sources", "readers"), EVERY_SHAPE)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_shape
@pytest.mark.parametrize("library", [functional, kernels], ids=["reference", "kernels"])
def test_two_phases_are_one_read_and_have_its_gradients(
    sources: int, readers: int, library: ModuleType
) -> None:
    block = Block.random(sources, readers, torch.float64, 2, 3)
    expected, actual = block.one_phase(), block.two_phase(library)
    pairs = [*zip(actual, expected, strict=True)]
    found = [gradients(each, block.leaves) for each in (actual, expected)]
    for mine, theirs in [*pairs, *zip(*found, strict=True)]:
        scale = max(1.0, float(theirs.detach().abs().max()))
        assert_close(mine / scale, theirs / scale, dtype=torch.float64, kind="same_math")


@every_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_errors_are_those_of_a_few_roundings(
    sources: int, readers: int, dtype: torch.dtype
) -> None:
    """Against float64 with the same inputs; the values, x and its gradient are rounded each."""
    block = Block.random(sources, readers, dtype, 64, d=40)
    exact = block.to(torch.float64)
    actual, expected = block.two_phase(), exact.one_phase()
    found = zip(gradients(actual, block.leaves), gradients(expected, exact.leaves), strict=True)
    for mine, theirs in [*zip(actual, expected, strict=True), *found]:
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error <= 4 * torch.finfo(dtype).eps


@every_dtype
@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (2, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("tokens", [3, 70])
def test_nothing_depends_to_the_last_bit_on_who_shares_a_pass(
    dtype: torch.dtype, parts: tuple[int, ...], tokens: int
) -> None:
    """So a pipeline stage or a checkpoint may cut a block anywhere."""
    block = Block.random(4, 5, dtype, tokens, 2, d=48)
    together, apart = block.two_phase(), block.two_phase(parts=parts)
    assert all(map(torch.equal, together, apart))
    found = [gradients(each, block.leaves) for each in (together, apart)]
    assert all(map(torch.equal, *found))


@every_dtype
def test_kept_are_references_and_the_announced_numbers_per_token(dtype: torch.dtype) -> None:
    """m (S + 1) for phase 1, three for each merge; x is the reader's own."""
    sources, readers, tokens = 3, 4, 30
    block, kept = Block.random(sources, readers, dtype, tokens, 1, d=64), []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = block.two_phase()
    own = {each.untyped_storage().data_ptr() for each in [*block.leaves, *outputs]}
    extra = {t.untyped_storage().data_ptr(): t for t in kept}
    extra = {key: tensor for key, tensor in extra.items() if key not in own}
    sums = [tensor for tensor in extra.values() if tensor.shape == block.partial.shape]
    assert len(sums) == readers - 1  # the running sum in front of each sublayer but the first
    numbers = sum(
        tensor.untyped_storage().nbytes() // tensor.element_size()
        for tensor in extra.values()
        if tensor.shape != block.partial.shape
    )
    assert numbers == tokens * (sources * (readers + 1) + 3 * readers)


def test_a_single_source_has_the_weight_one_and_gives_the_query_no_gradient() -> None:
    """As at the first sublayer of all, in any precision: exactly."""
    for dtype in DTYPES:
        block = Block.random(1, 2, dtype, 5, 2)
        reads = kernels.read_closed(block.sources, block.directions, eps=EPS)
        assert all(torch.equal(read.values, block.sources[0]) for read in reads)
        values = [read.values for read in reads]
        (gradient,) = gradients_of(values, [block.directions])
        assert not gradient.any()


def gradients_of(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    draw = random_tensors(8)
    return list(
        torch.autograd.grad(outputs, leaves, [draw(*each.shape).to(each.dtype) for each in outputs])
    )


def test_readers_that_nobody_used_and_frozen_inputs_change_nothing_for_others() -> None:
    block = Block.random(3, 3, torch.float64, 4, 2)
    first = kernels.read_closed(block.sources, block.directions, eps=EPS)[0]
    alone = kernels.read_closed(block.sources, block.directions[:1], eps=EPS)[0]
    pairs = [gradients_of([read.values, read.lse], block.sources) for read in (first, alone)]
    assert all(map(torch.equal, *pairs))
    full = gradients(block.two_phase(), block.leaves)
    leaves = block.leaves
    for frozen in range(len(leaves)):
        leaves[frozen].requires_grad_(False)
        rest = [leaf for leaf in leaves if leaf.requires_grad]
        expected = [each for i, each in enumerate(full) if i != frozen]
        assert all(map(torch.equal, gradients(block.two_phase(), rest), expected))
        leaves[frozen].requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_neither_values_nor_gradients(dtype: torch.dtype) -> None:
    block = Block.random(3, 2, dtype, 4, 2)
    expected = block.two_phase()
    with torch.autocast("cpu", torch.bfloat16):
        actual = block.two_phase()
    assert all(map(torch.equal, actual, expected))
    found = [gradients(each, block.leaves) for each in (actual, expected)]
    assert all(map(torch.equal, *found))


def test_gradcheck() -> None:
    block = Block.random(2, 2, torch.float64, 2, d=3)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        again = Block(list(leaves[:2]), leaves[2], leaves[3], list(leaves[4:]))
        return tuple(again.two_phase())

    assert torch.autograd.gradcheck(function, block.leaves)


@every_dtype
def test_no_token_is_no_problem(dtype: torch.dtype) -> None:
    block = Block.random(2, 3, dtype, 0, 2)
    outputs = block.two_phase()
    assert all(each.shape == (0, 2, 20) for each in outputs)
    assert not gradients(outputs, block.leaves)[2].any()
