# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of sources with many readers: summed in place, in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.kernels import GradientBuffer, buffered, read_sources
from megatron_residuals.modules import open_state
from megatron_residuals.modules import state as state_module
from tests.functional.loops import random_tensors
from tests.modules.tiny_model import TinyModel, tokens

D, LEAD, EPS, READERS = 16, (6, 2), 1e-6, 9
SIXTEEN_BIT = [torch.bfloat16, torch.float16]
EVERY_DTYPE = [*SIXTEEN_BIT, torch.float32, torch.float64]


class Readers:
    """A source that many readers attend to, each beside a source of its own."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        draw = random_tensors(seed)
        self.source = draw(*LEAD, D).to(dtype)
        self.others = [draw(*LEAD, D).to(dtype) for _ in range(READERS)]
        self.queries = [draw(D).float() for _ in range(READERS)]
        self.cotangents = [draw(*LEAD, D).to(dtype) for _ in range(READERS)]
        self.gain = (1 + 0.5 * draw(D)).float()

    def read(
        self, i: int, source: Tensor, buffer: GradientBuffer | None, dtype: torch.dtype
    ) -> Tensor:
        """What reader i reads, computed in a dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        query, gain = self.queries[i].to(wide), self.gain.to(wide)
        sources = (source, self.others[i].to(dtype))
        return read_sources(sources, query, gain, eps=EPS, buffers=(buffer,))

    def gradient(
        self, dtype: torch.dtype, *, with_buffer: bool, backwards: range = range(READERS)
    ) -> Tensor:
        """Gradient of the source for the cotangents of some readers; all of them read."""
        leaf = self.source.to(dtype).requires_grad_()
        source, buffer = buffered(leaf) if with_buffer else (leaf, None)
        values = [self.read(i, source, buffer, dtype) for i in range(READERS)]
        cotangents = [self.cotangents[i].to(dtype) for i in backwards]
        torch.autograd.backward([values[i] for i in backwards], cotangents)
        assert leaf.grad is not None
        return leaf.grad

    def alone(self, i: int) -> Tensor:
        """Float32 gradient of the source for reader i alone."""
        leaf = self.source.float().requires_grad_()
        value = self.read(i, leaf, None, torch.float32)
        (gradient,) = torch.autograd.grad(value, leaf, self.cotangents[i].float())
        return gradient


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("backwards", [range(READERS), range(2, 5), range(4, 5)], ids=str)
def test_the_gradient_is_the_float32_sum_of_the_readers_that_ran_rounded_once(
    dtype: torch.dtype, backwards: range
) -> None:
    """Autograd runs the readers from the last to the first.

    Up to one rounding, and float32's where a sum lies between two numbers: processors that multiply
    and add in one step round it otherwise.
    """
    readers = Readers(dtype)
    expected = summed([readers.alone(i) for i in reversed(backwards)])
    actual = readers.gradient(dtype, with_buffer=True, backwards=backwards)
    assert actual.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 * expected.abs()
    noise = 1e-6 * expected.abs().max()
    assert ((actual.float() - expected).abs() <= rounding + noise).all()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_buffer_beats_the_sum_of_autograd(dtype: torch.dtype, seed: int) -> None:
    readers = Readers(dtype, seed)
    exact = readers.gradient(torch.float64, with_buffer=False)
    errors = [
        (readers.gradient(dtype, with_buffer=with_buffer).double() - exact).norm()
        for with_buffer in (True, False)
    ]
    assert errors[0] < 0.7 * errors[1]
    # nothing but the one rounding is left
    assert errors[0] <= torch.finfo(dtype).eps / 2 * exact.norm()


def test_a_producer_s_hook_sees_the_whole_gradient_once() -> None:
    readers, seen = Readers(torch.bfloat16), []
    leaf = readers.source.requires_grad_()
    producer = 3 * leaf
    producer.register_hook(lambda gradient: seen.append(gradient.clone()))
    source, buffer = buffered(producer)
    values = [readers.read(i, source, buffer, torch.bfloat16) for i in range(READERS)]
    torch.autograd.backward(values, readers.cotangents)
    assert len(seen) == 1 and leaf.grad is not None
    assert torch.equal(3 * seen[0], leaf.grad)


def test_readers_that_know_no_buffer_add_theirs_through_autograd() -> None:
    """As the packing of a pipeline payload does; the sum is still rounded once behind autograd."""
    readers = Readers(torch.bfloat16)
    leaf = readers.source.requires_grad_()
    source, buffer = buffered(leaf)
    value = readers.read(0, source, buffer, torch.bfloat16)
    torch.autograd.backward([value, source], [readers.cotangents[0], readers.cotangents[1]])
    expected = (readers.alone(0) + readers.cotangents[1].float()).bfloat16()
    assert leaf.grad is not None and torch.equal(leaf.grad, expected)


def test_a_source_that_no_reader_trains_gets_what_autograd_brings_or_nothing() -> None:
    leaf = torch.ones(D, dtype=torch.bfloat16, requires_grad=True)
    source, buffer = buffered(leaf)
    assert buffer is not None and buffer.take() is None
    other = torch.ones(D, dtype=torch.bfloat16, requires_grad=True)
    (source.detach() * other).sum().backward()
    assert leaf.grad is None
    (2 * source).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full_like(leaf, 2))


def test_a_backward_that_stops_short_of_the_source_leaves_nothing_for_the_next() -> None:
    """As when someone asks for the gradients of the queries alone."""
    readers = Readers(torch.bfloat16)
    leaf = readers.source.requires_grad_()
    source, buffer = buffered(leaf)
    query = readers.queries[0].requires_grad_()
    value = readers.read(0, source, buffer, torch.bfloat16)
    cotangent = readers.cotangents[0]
    (expected,) = torch.autograd.grad(value, leaf, cotangent, retain_graph=True)
    torch.autograd.grad(value, query, cotangent, retain_graph=True)
    (again,) = torch.autograd.grad(value, leaf, cotangent, retain_graph=True)
    assert torch.equal(again, expected)
    torch.autograd.grad(value, query, cotangent, retain_graph=True)
    (direct,) = torch.autograd.grad(source, leaf, cotangent)
    assert torch.equal(direct, cotangent)


def test_two_backward_passes_over_one_graph_give_the_same() -> None:
    readers = Readers(torch.bfloat16)
    leaf = readers.source.requires_grad_()
    source, buffer = buffered(leaf)
    values = [readers.read(i, source, buffer, torch.bfloat16) for i in range(READERS)]
    first, second = (
        torch.autograd.grad(values, leaf, readers.cotangents, retain_graph=True)[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_sources_without_gradient_are_left_as_they_are(dtype: torch.dtype) -> None:
    frozen = torch.ones(D, dtype=dtype)
    assert buffered(frozen) == (frozen, None)
    trained = torch.ones(D, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        assert buffered(trained) == (trained, None)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_a_buffered_source_is_a_reference_to_the_same_memory(dtype: torch.dtype) -> None:
    source = torch.ones(LEAD, dtype=dtype, requires_grad=True)
    reference, buffer = buffered(source)
    assert buffer is not None and reference.data_ptr() == source.data_ptr()
    assert torch.equal(reference, source)


def rounded(tensor: Tensor) -> Tensor:
    """The value of bfloat16, the gradient of float64."""
    return tensor + (tensor.bfloat16().double() - tensor).detach()


def embedding_gradients(cast: Callable[[Tensor], Tensor], seeds: range) -> Tensor:
    """Of a model of seven sources, the first of which everyone reads, for several batches.

    Sublayers compute in float64; ``cast`` makes what enters the state.
    """
    model, found = TinyModel(ResidualConfig("attnres"), random_residual=0.3), []
    for seed in seeds:
        embedded = cast(model.shared.embedding[tokens(seed)])
        state: Any = open_state(model.config, embedded)
        for residual, sublayer in zip(model.residuals, model.shared.sublayers, strict=True):
            x, pending = residual.read(state)
            state = residual.write(pending, cast(sublayer(cast(x).double())))
        logits = model.shared.logits(cast(model.head(state)).double())
        cotangent = random_tensors(seed)(*logits.shape)
        found.append(torch.autograd.grad(logits, embedded, cotangent)[0].double().flatten())
    return torch.stack(found)


def test_a_whole_model_with_a_16_bit_state_is_more_exact_with_buffers_than_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the same rounded forward with a backward in float64."""
    seeds = range(20)
    exact = embedding_gradients(rounded, seeds)
    with_buffers = (embedding_gradients(Tensor.bfloat16, seeds) - exact).norm(dim=1)
    monkeypatch.setattr(state_module, "buffered", lambda source: (source, None))
    without = (embedding_gradients(Tensor.bfloat16, seeds) - exact).norm(dim=1)
    assert (with_buffers / without).log().mean().exp() < 0.95
