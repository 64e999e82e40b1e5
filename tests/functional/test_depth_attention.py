# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over depth: weights, values, gradients, and what autograd keeps of the sources."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_residuals.config import ResidualConfig
from megatron_residuals.functional import (
    depth_weights,
    head_weights,
    read_by_heads,
    read_sources,
)
from megatron_residuals.modules import build_head
from megatron_residuals.testing import assert_close
from tests.functional import loops

D = 6
EPS = 1e-2  # large, so that a misplaced eps shows

close = functools.partial(assert_close, dtype=torch.float64, kind="same_math")


def inputs(num_sources: int, *lead: int, seed: int = 1) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sources of unequal size, a query, and a gain that is not one."""
    draw = loops.random_tensors(seed)
    sources = [(0.3 + j) * draw(*lead, D) for j in range(num_sources)]
    return sources, draw(D), 1 + 0.5 * draw(D)


def rows(sources: list[Tensor], *token: int) -> loops.Matrix:
    return [source[token].tolist() for source in sources]


@pytest.mark.parametrize("eps", [1e-30, EPS])
@pytest.mark.parametrize("num_sources", [1, 2, 5])
def test_weights_are_a_softmax_over_sources_for_every_token(num_sources: int, eps: float) -> None:
    sources, query, gain = inputs(num_sources, 2, 3)
    weights = depth_weights(sources, query, gain, eps=eps)
    assert weights.shape == (num_sources, 2, 3)
    for s in range(2):
        for b in range(3):
            expected = loops.depth_weights(rows(sources, s, b), query.tolist(), gain.tolist(), eps)
            close(weights[:, s, b], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("num_sources", [1, 2, 5])
def test_the_values_are_the_sources_as_they_are_not_normalised(num_sources: int) -> None:
    sources, query, gain = inputs(num_sources, 2, 3)
    x = read_sources(sources, query, gain, eps=EPS)
    for s in range(2):
        for b in range(3):
            token = rows(sources, s, b)
            weights = loops.depth_weights(token, query.tolist(), gain.tolist(), EPS)
            expected = [
                sum(weight * source[c] for weight, source in zip(weights, token, strict=True))
                for c in range(D)
            ]
            close(x[s, b], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("num_sources", [2, 3, 7])
def test_a_zero_query_gives_the_mean_of_the_sources(num_sources: int) -> None:
    sources, query, gain = inputs(num_sources, 4)
    weights = depth_weights(sources, 0 * query, gain, eps=EPS)
    assert torch.equal(weights, torch.full_like(weights, 1 / num_sources))
    total = sources[0]
    for source in sources[1:]:
        total = total + source
    close(read_sources(sources, 0 * query, gain, eps=EPS), total / num_sources)


def test_a_zero_query_gives_a_gradient_to_the_query_and_none_to_the_gain() -> None:
    sources, query, gain = inputs(3, 4)
    query, gain = torch.zeros_like(query).requires_grad_(), gain.requires_grad_()
    x = read_sources(sources, query, gain, eps=EPS)
    d_query, d_gain = torch.autograd.grad(x, (query, gain), loops.random_tensors(2)(4, D))
    assert torch.equal(d_gain, torch.zeros_like(d_gain))
    assert d_query.abs().min() > 1e-3


@pytest.mark.parametrize("chosen", range(5))
def test_a_huge_query_along_one_source_selects_that_source(chosen: int) -> None:
    """However short it is: keys are normalised, so only the direction counts."""
    sources, _, gain = inputs(5)
    query = 1e6 * sources[chosen] / sources[chosen].norm() / gain
    weights = depth_weights(sources, query, gain, eps=1e-30)
    assert weights.argmax() == chosen and weights[chosen] > 1 - 1e-12
    close(read_sources(sources, query, gain, eps=1e-30), sources[chosen])


def test_weights_do_not_change_when_a_source_is_scaled() -> None:
    sources, query, gain = inputs(3, 4)
    scaled = [sources[0], 1000 * sources[1], sources[2]]
    close(
        depth_weights(scaled, query, gain, eps=1e-30),
        depth_weights(sources, query, gain, eps=1e-30),
    )


@pytest.mark.parametrize("num_sources", [1, 2, 4])
def test_the_gradients_are_those_derived_by_hand(num_sources: int) -> None:
    sources, query, gain = inputs(num_sources, 3)
    leaves = [t.requires_grad_() for t in (*sources, query, gain)]
    cotangent = loops.random_tensors(3)(3, D)
    x = read_sources(sources, query, gain, eps=EPS)
    *d_sources, d_query, d_gain = torch.autograd.grad(x, leaves, cotangent)
    expected_query = torch.zeros(D, dtype=torch.float64)
    expected_gain = torch.zeros(D, dtype=torch.float64)
    for t in range(3):
        by_source, for_query, for_gain = loops.depth_read_backward(
            rows(sources, t), query.tolist(), gain.tolist(), EPS, cotangent[t].tolist()
        )
        expected_query += torch.tensor(for_query, dtype=torch.float64)
        expected_gain += torch.tensor(for_gain, dtype=torch.float64)
        for actual, expected in zip(d_sources, by_source, strict=True):
            close(actual[t], torch.tensor(expected, dtype=torch.float64), name="source")
    close(d_query, expected_query, name="query")
    close(d_gain, expected_gain, name="gain")


@pytest.mark.parametrize("num_sources", [1, 3])
def test_gradcheck(num_sources: int) -> None:
    sources, query, gain = inputs(num_sources, 2)
    cotangent = loops.random_tensors(4)(2, D)

    def projected(query: Tensor, gain: Tensor, *sources: Tensor) -> Tensor:
        return (read_sources(sources, query, gain, eps=EPS) * cotangent).sum()

    leaves = [t.requires_grad_() for t in (query, gain, *sources)]
    assert torch.autograd.gradcheck(projected, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_source_is_returned_bit_for_bit_and_gives_the_query_an_exact_zero(
    dtype: torch.dtype,
) -> None:
    (source,), query, gain = inputs(1, 2, 3)
    wide = torch.promote_types(dtype, torch.float32)
    source = source.to(dtype).requires_grad_()
    query, gain = query.to(wide).requires_grad_(), gain.to(wide).requires_grad_()
    x = read_sources([source], query, gain, eps=EPS)
    assert x.dtype == dtype and torch.equal(x, source)
    cotangent = loops.random_tensors(5)(2, 3, D).to(dtype)
    d_source, d_query, d_gain = torch.autograd.grad(x, (source, query, gain), cotangent)
    assert torch.equal(d_source, cotangent)
    assert torch.equal(d_query, torch.zeros_like(query))
    assert torch.equal(d_gain, torch.zeros_like(gain))


class ResultSizes(TorchFunctionMode):
    """Records how many numbers every torch function returned."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sources_are_never_stacked(dtype: torch.dtype) -> None:
    """Nothing computed or kept for backward is larger than one source, and at full precision
    everything kept of that size *is* a source: its storage, not a copy."""
    sources, query, gain = inputs(4, 4, 8)
    sources = [source.to(dtype).requires_grad_() for source in sources]
    wide = torch.promote_types(dtype, torch.float32)
    query, gain = query.to(wide).requires_grad_(), gain.to(wide).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, ResultSizes() as results:
        read_sources(sources, query, gain, eps=EPS)
    size = sources[0].numel()
    assert max(results.sizes) == size
    assert max(tensor.numel() for tensor in kept) == size
    if dtype == wide:
        owned = {source.untyped_storage().data_ptr() for source in sources}
        of_that_size = [tensor for tensor in kept if tensor.numel() == size]
        assert {tensor.untyped_storage().data_ptr() for tensor in of_that_size} == owned


def test_a_source_that_is_all_zero_gets_finite_gradients() -> None:
    sources, query, gain = inputs(3, 2)
    sources[1] = torch.zeros_like(sources[1])
    leaves = [t.float().requires_grad_() for t in (*sources, query, gain)]
    *some, q, g = leaves
    x = read_sources(some, q, g, eps=1e-6)
    grads = torch.autograd.grad(x, leaves, loops.random_tensors(6)(2, D).float())
    assert x.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_sources_that_are_views_or_transposed_give_the_same() -> None:
    sources, query, gain = inputs(3, 4, 5)
    strided = [source.transpose(0, 1).contiguous().transpose(0, 1) for source in sources]
    assert not strided[0].is_contiguous()
    close(read_sources(strided, query, gain, eps=EPS), read_sources(sources, query, gain, eps=EPS))


@pytest.mark.parametrize(("norm", "is_read"), [(1.8e19, True), (1.9e19, False)])
def test_keys_are_normalised_up_to_where_the_hosts_norms_read_zeros(
    norm: float, is_read: bool
) -> None:
    """Squares of larger sources overflow float32: such a source weighs as if its key were zero, and
    RMSNorm, in front of every sublayer, gives zeros for it. Scaling keys first would cost a pass
    over all sources and give the sublayer behind nothing to work with."""
    sources, query, gain = inputs(3, 4)
    large = [source / source.norm(dim=-1, keepdim=True) * norm for source in sources]
    weights = depth_weights([source.float() for source in large], query, gain, eps=EPS)
    exact = depth_weights(
        large if is_read else [0 * source for source in large], query, gain, eps=EPS
    )
    assert_close(weights, exact.float(), dtype=torch.float32, kind="same_math")
    normed = torch.nn.functional.rms_norm(large[0].float(), (D,))
    assert bool(normed.any()) is is_read


def test_one_head_is_attnres() -> None:
    sources, query, gain = inputs(4, 2, 3)
    close(read_by_heads(sources, query, gain, eps=EPS), read_sources(sources, query, gain, eps=EPS))
    weights = head_weights(sources, query, gain, eps=EPS, heads=1)
    close(weights.squeeze(-1), depth_weights(sources, query, gain, eps=EPS))


@pytest.mark.parametrize("heads", [2, 3, 6])
def test_every_head_has_a_softmax_over_keys_normalised_before_they_are_cut(heads: int) -> None:
    """So a head is AttnRes with a query that is zero elsewhere, and reads its slice alone."""
    sources, query, gain = inputs(4, 2, 3)
    x = read_by_heads(sources, query, gain, eps=EPS, heads=heads)
    for part in torch.arange(D).chunk(heads):
        alone = torch.zeros_like(query).index_copy(0, part, query[part])
        close(x[..., part], read_sources(sources, alone, gain, eps=EPS)[..., part])


def test_an_additive_read_is_the_sum_of_all_sources_and_what_is_read() -> None:
    sources, query, gain = inputs(4, 2, 3)
    options = dict(eps=EPS, heads=2)
    read = read_by_heads(sources, query, gain, **options)
    close(read_by_heads(sources, query, gain, additive=True, **options), sum(sources) + read)


def test_a_number_of_heads_that_does_not_divide_the_hidden_size_is_refused() -> None:
    config = ResidualConfig("attnres", attnres_heads=4)
    with pytest.raises(ValueError, match="attnres_heads is 4, which does not divide"):
        build_head(config, config.depth_map(2), hidden_size=D)
