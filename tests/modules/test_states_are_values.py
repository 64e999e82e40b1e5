# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The state is a value: in at one end, out at the other, kept and changed by nobody in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_residuals.config import ResidualConfig
from megatron_residuals.modules import ResidualState, SourceState
from tests.functional.loops import random_tensors
from tests.modules.tiny_model import MECHANISMS, NUM_SUBLAYERS, TinyModel, tokens

every_mechanism = pytest.mark.parametrize("config", MECHANISMS, ids=str)


def tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for member in state:
            yield from tensors(member)


def gradients(model: TinyModel, logits: Tensor) -> tuple[Tensor, ...]:
    cotangent = random_tensors(1)(*logits.shape)
    return torch.autograd.grad(logits, list(model.parameters()), cotangent)


def assert_same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every_mechanism
def test_reading_and_writing_twice_gives_the_same(config: ResidualConfig) -> None:
    model = TinyModel(config, random_residual=0.5)
    for i, state in enumerate(model.states(tokens())[:-1]):
        residual = model.residuals[i]
        (x, pending), (again, pending_again) = residual.read(state), residual.read(state)
        assert torch.equal(x, again)
        output = model.shared.sublayers[i](x)
        first = residual.write(pending, output)
        residual.write(pending_again, 2 * output)
        assert_same(tuple(tensors(first)), tuple(tensors(residual.write(pending, output))))


@every_mechanism
def test_no_verb_changes_a_state_that_it_was_given(config: ResidualConfig) -> None:
    model = TinyModel(config, random_residual=0.5)
    states = model.states(tokens())
    copies = [[tensor.clone() for tensor in tensors(state)] for state in states]
    versions = [[tensor._version for tensor in tensors(state)] for state in states]
    for i, state in enumerate(states[:-1]):
        model.step(state, i)
    gradients(model, model.close(states[-1]))
    for state, copy, version in zip(states, copies, versions, strict=True):
        assert_same(tuple(tensors(state)), tuple(copy))
        assert [tensor._version for tensor in tensors(state)] == version


@every_mechanism
def test_interleaved_micro_batches_do_not_notice_each_other(config: ResidualConfig) -> None:
    """One sublayer of the one, one of the other; backwards in the opposite order."""
    model = TinyModel(config, random_residual=0.5)
    first, second = tokens(1), tokens(2)
    assert not torch.equal(first, second)
    alone = [gradients(model, model(batch)) for batch in (first, second)]
    states: list[ResidualState] = [model.open(first), model.open(second)]
    for i in range(NUM_SUBLAYERS):
        states = [model.step(state, i) for state in states]
    together = [model.close(state) for state in states]
    assert torch.equal(together[0], model(first)) and torch.equal(together[1], model(second))
    assert_same(gradients(model, together[1]), alone[1])
    assert_same(gradients(model, together[0]), alone[0])


@every_mechanism
def test_modules_keep_no_tensor_but_their_parameters(config: ResidualConfig) -> None:
    model = TinyModel(config)
    model(tokens())
    for module in (*model.residuals.modules(), *model.head.modules()):
        assert not list(module.buffers())
        assert not [name for name, value in vars(module).items() if list(tensors(value))]


@every_mechanism
def test_a_recomputed_sublayer_gives_the_same_gradients_bit_for_bit(config: ResidualConfig) -> None:
    model = TinyModel(config, random_residual=0.5)
    expected = gradients(model, model(tokens()))
    state = model.open(tokens())
    for i in range(NUM_SUBLAYERS):
        state = checkpoint(model.step, state, i, use_reentrant=False)
    assert_same(gradients(model, model.close(state)), expected)


@pytest.mark.parametrize("block_sublayers", [1, 2, 5])
def test_sources_are_passed_on_by_reference_each_held_once(block_sublayers: int) -> None:
    config = ResidualConfig("block_attnres", block_sublayers=block_sublayers)
    model = TinyModel(config)
    state = model.open(tokens())
    assert isinstance(state, SourceState) and state.sources == ()
    for i in range(NUM_SUBLAYERS):
        x, pending = model.residuals[i].read(state)
        output = model.shared.sublayers[i](x)
        after = model.residuals[i].write(pending, output)
        for old, new in zip(state.sources, after.sources, strict=False):
            assert new is old
        if i % block_sublayers == 0:
            assert len(after.sources) == len(state.sources) + 1
            assert after.sources[-1].data_ptr() == state.partial.data_ptr()
            assert after.partial is output
        else:
            assert len(after.sources) == len(state.sources)
            assert torch.equal(after.partial, state.partial + output)
        storages = [t.untyped_storage().data_ptr() for t in tensors(after)]
        assert len(set(storages)) == len(storages)
        state = after
