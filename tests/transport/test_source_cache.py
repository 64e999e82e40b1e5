# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Life of a cached source: values until the last fetch, gradients by counted deposits."""

from __future__ import annotations

import pytest
import torch

from megatron_residuals.transport.source_cache import SourceCache


def source(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=requires_grad)


def test_a_value_lives_until_its_last_fetch_and_is_never_copied() -> None:
    cache, value = SourceCache(), source()
    assert cache.stash(0, 7, value, fetches=2)
    first = cache.fetch(0, 7)
    assert cache.num_values == 1
    second = cache.fetch(0, 7)
    assert cache.num_values == 0
    assert first.data_ptr() == second.data_ptr() == value.data_ptr()
    assert first.is_leaf and second.is_leaf and first is not second


def test_the_owner_collects_the_sum_of_the_deposits() -> None:
    cache, value = SourceCache(), source()
    cache.stash(1, 0, value, fetches=2)
    weights = [torch.randn_like(value) for _ in range(2)]
    leaves = [cache.fetch(1, 0) for _ in range(2)]
    for leaf, weight in zip(leaves, weights, strict=True):
        (leaf * weight).sum().backward()
        assert leaf.grad is None
    assert torch.equal(cache.collect(1, 0), weights[0] + weights[1])
    assert len(cache) == 0


def test_a_missing_deposit_names_micro_batch_and_source() -> None:
    cache = SourceCache()
    cache.stash(3, 5, source(), fetches=2)
    cache.fetch(3, 5).sum().backward()
    cache.fetch(3, 5)
    with pytest.raises(RuntimeError, match="micro-batch 3, source 5: 1 of its gradients"):
        cache.collect(3, 5)


def test_an_extra_deposit_names_micro_batch_and_source() -> None:
    cache = SourceCache()
    cache.stash(3, 5, source(), fetches=1)
    total = cache.fetch(3, 5).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="micro-batch 3, source 5: a gradient came back"):
        total.backward()


def test_stashing_twice_and_fetching_what_is_not_there_are_errors() -> None:
    cache = SourceCache()
    cache.stash(0, 1, source(), fetches=1)
    with pytest.raises(RuntimeError, match="micro-batch 0, source 1 is stashed twice"):
        cache.stash(0, 1, source(), fetches=1)
    cache.fetch(0, 1)
    for micro_batch, missing in ((0, 1), (0, 2)):
        with pytest.raises(RuntimeError, match=f"micro-batch {micro_batch}, source {missing}"):
            cache.fetch(micro_batch, missing)


@pytest.mark.parametrize("frozen", [True, False])
def test_without_gradients_nothing_is_left_behind(frozen: bool) -> None:
    cache = SourceCache()
    with torch.set_grad_enabled(frozen):
        assert not cache.stash(0, 0, source(requires_grad=not frozen), fetches=2)
    for _ in range(2):
        assert not cache.fetch(0, 0).requires_grad
    assert len(cache) == 0


def test_clearing_forgets_a_step_that_raised() -> None:
    cache = SourceCache()
    cache.stash(0, 0, source(), fetches=1)
    cache.clear()
    assert cache.stash(0, 0, source(), fetches=1)
