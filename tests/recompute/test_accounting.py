# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The count of retained bytes, on graphs small enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from megatron_residuals.recompute.accounting import Retained, RetainedBytes, reachable_bytes
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import ToyGPT, setup_parallel

SIZE = 7 * 5 * 4  # bytes of what `leaf` makes


def leaf() -> Tensor:
    return torch.randn(7, 5, requires_grad=True)


def test_a_product_keeps_both_factors_and_a_sum_keeps_nothing() -> None:
    a, b = leaf(), leaf()
    with RetainedBytes() as retained:
        total = a + b
        assert retained.measure() == Retained(0, 0, {})
        product = total * b
        assert retained.measure() == Retained(2 * SIZE, 2, {((7, 5), torch.float32): 2 * SIZE})
        product.backward(torch.randn(7, 5))
        assert retained.measure().bytes == 0


def test_bytes_go_with_the_graph_when_no_backward_comes() -> None:
    a = leaf()
    with RetainedBytes() as retained:
        exponential = a.exp()
        assert retained.measure().bytes == SIZE  # its own output, and no cycle with it
        del exponential
        assert retained.measure().bytes == 0


def test_each_storage_counts_once_whatever_views_of_it_are_saved() -> None:
    a = leaf()
    with RetainedBytes() as retained:
        part = a.detach()[2:4].requires_grad_()
        both = [a * a, a.t().sin(), part * 3.0, part.view(-1).cos(), a.detach() * a]
        # the whole storage of a, seen through the largest of its views
        assert retained.measure() == Retained(SIZE, 1, {((7, 5), torch.float32): SIZE})
        assert len(both) == 5


def test_a_view_keeps_the_whole_storage_alive_and_counts_as_such() -> None:
    wide = torch.randn(10, 100)
    row = wide[3].requires_grad_()
    with RetainedBytes() as retained:
        squared = row.square()
        del wide
        assert retained.measure().bytes == 10 * 100 * 4
        assert squared.requires_grad


def test_dtypes_and_shapes_are_told_apart() -> None:
    a = leaf()
    with RetainedBytes() as retained:
        kept = (a.double().sin(), a.bfloat16().sin(), a[0].clone().sin())
        by_shape = retained.measure().by_shape
        assert by_shape == {
            ((7, 5), torch.float64): 2 * SIZE,
            ((7, 5), torch.bfloat16): SIZE // 2,
            ((5,), torch.float32): SIZE // 7,
        }
        text = str(retained.measure())
        assert f"{sum(by_shape.values())} bytes in 3 storages" in text
        assert text.index("float64") < text.index("bfloat16")
        assert len(kept) == 3


def test_excluded_storages_do_not_count_in_any_form() -> None:
    weight, x = leaf(), leaf()
    with RetainedBytes(exclude=[weight]) as retained:
        y = torch.nn.functional.linear(x, weight)
        assert retained.measure().bytes == retained.sample() == SIZE
        z = (weight.t() * 2.0).sin()  # a new storage is no parameter
        assert retained.measure().bytes == retained.sample() == 2 * SIZE
        retained.exclude(x)
        assert retained.measure().bytes == retained.sample() == SIZE
        assert y.requires_grad and z.requires_grad


def test_what_is_kept_beside_autograd_counts_with_it() -> None:
    a, cache = leaf(), [torch.randn(100)]
    with RetainedBytes(beside=lambda: cache) as retained:
        b = a.sin()
        cache.append(a.detach())  # the same storage
        assert retained.measure().bytes == retained.sample() == SIZE + 400
        cache.clear()
        assert retained.measure().bytes == retained.sample() == SIZE
        assert b.requires_grad


def test_an_emptied_storage_counts_nothing_until_it_is_filled_again() -> None:
    a = leaf()
    with RetainedBytes() as retained:
        x = a * 2.0
        y = x.sin()
        size, values = x.untyped_storage().size(), x.detach().clone()
        x.untyped_storage().resize_(0)
        assert retained.measure() == Retained(0, 0, {})
        x.untyped_storage().resize_(size)
        x.data.copy_(values)
        assert retained.measure().bytes == retained.sample() == SIZE
        (gradient,) = torch.autograd.grad(y.sum(), a)
    assert torch.equal(gradient, 2.0 * values.cos())


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        result = scale * x**3
        ctx.save_for_backward(x, scale, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, scale, result = ctx.saved_tensors
        assert torch.equal(result, scale * x**3)
        return 3.0 * scale * x**2 * gradient, None


def test_custom_functions_are_seen_inputs_outputs_and_all() -> None:
    a, scale = leaf(), torch.randn(5)
    cotangent = torch.randn(7, 5)
    with RetainedBytes() as retained:
        y = _Cube.apply(a, scale)
        assert retained.measure().bytes == 2 * SIZE + 20
        y.backward(cotangent)
        assert retained.measure().bytes == 0
    assert torch.equal(a.grad, 3.0 * scale * a.detach() ** 2 * cotangent)


def test_a_replay_is_the_peak_when_backward_is_sampled() -> None:
    def step(sample_backward: bool) -> tuple[int, int]:
        a = leaf()
        with RetainedBytes(sample_backward=sample_backward) as retained:
            y = checkpoint(lambda x: x.sin().sin().sin().sin(), False, a)
            kept = retained.sample()
            y.sum().backward()
            assert retained.measure().bytes == 0
        return kept, retained.peak

    def work() -> list[tuple[int, int]]:
        setup_parallel(ToyGPT())
        return [step(False), step(True)]

    ((without, sampled),) = run_ranks(1, work)
    assert without == (SIZE, SIZE)
    assert sampled == (SIZE, 4 * SIZE)  # four arguments, of which one is the input


def test_the_hosts_checkpoint_keeps_its_tensor_arguments_and_nested_ones_are_seen_too() -> None:
    def work() -> None:
        setup_parallel(ToyGPT())
        a, b = leaf(), leaf()
        heights = []

        def inner(x: Tensor) -> Tensor:
            y = x.sin().sin().sin()
            if torch.is_grad_enabled():
                heights.append(retained.measure().bytes)
            return y

        def outer(x: Tensor, y: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(inner, False, x * y)
            return x

        with RetainedBytes() as retained:
            out = checkpoint(outer, False, a, b)
            assert retained.measure().bytes == 2 * SIZE
            out.sum().backward()
            assert retained.measure().bytes == 0
        # kept a, b; the outer replay's two products and the value between them; then the second
        # inner replay's two further sines; by the first, the second's three have gone
        assert heights == [(2 + 3 + 2) * SIZE, (2 + 1 + 2) * SIZE]

    run_ranks(1, work)


def test_output_discarding_checkpoints_of_the_host_count_nothing_in_between() -> None:
    def work() -> None:
        setup_parallel(ToyGPT())
        a = leaf()
        with RetainedBytes(sample_backward=True) as retained:
            norm = CheckpointWithoutOutput()
            x = norm.checkpoint(torch.sin, a)
            y = (x * x).cos()
            norm.discard_output_and_register_recompute(y)
            # a, and the argument of the cosine; the sine is given up
            assert retained.sample() == 2 * SIZE
            y.sum().backward()
            assert retained.peak > 2 * SIZE
            assert retained.measure().bytes == 0

    run_ranks(1, work)


def test_nothing_is_left_when_a_step_raises() -> None:
    a = leaf()

    def step() -> None:
        y = a.sin().exp()
        assert retained.measure().bytes == 2 * SIZE
        raise ValueError(y.shape)

    with RetainedBytes() as retained:
        with pytest.raises(ValueError, match="7, 5"):
            step()
        assert retained.measure().bytes == 0


def test_hooks_end_with_the_block_and_what_was_kept_is_still_counted() -> None:
    a = leaf()
    with RetainedBytes() as retained:
        y = a.sin()
    z = a.exp()
    assert retained.measure().bytes == SIZE
    y.sum().backward()
    assert retained.measure().bytes == 0
    assert z.requires_grad


def test_reachable_bytes_find_what_a_closure_or_a_context_hides() -> None:
    class Hides(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.hidden = x.detach().double()
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2.0

    a = leaf()
    before = reachable_bytes().bytes
    with RetainedBytes() as retained:
        y = Hides.apply(a)
        assert retained.measure().bytes == 0
        assert reachable_bytes([y]).bytes - before == 2 * SIZE
