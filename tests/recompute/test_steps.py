# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Giving up and replaying: what is empty when, what runs how often, and that nothing changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.recompute.steps import GroupStep, MixStep, Step, plain_step
from tests.modules.tiny_model import NUM_SUBLAYERS, TinyModel, tokens
from tests.recompute.watched import Run, assert_same_gradients, assert_same_values, is_empty

STREAMS = ["hc(streams=3)", "hc(streams=2, hc_dynamic=False)"]
STREAMS += ["mhc(streams=3, mhc_sinkhorn_iterations=4)"]
STREAMS += ["mhc(streams=2, mhc_convention='dsv4', mhc_sinkhorn_iterations=2)"]
SOURCES = ["attnres", "block_attnres(block_sublayers=2)", "block_attnres(block_sublayers=5)"]
LENGTHS = range(1, NUM_SUBLAYERS + 2)

group_cases = pytest.mark.parametrize(
    ("residual", "length"),
    [(residual, length) for residual in (STREAMS[0], STREAMS[3]) for length in LENGTHS],
)
mix_cases = pytest.mark.parametrize("residual", STREAMS + SOURCES)


def steps_for(residual: str) -> list[Callable[[], Step]]:
    if residual in SOURCES:
        return [MixStep]
    return [MixStep, *(lambda r=r: GroupStep(r, NUM_SUBLAYERS) for r in (1, 2, 4, 7))]


every_step = pytest.mark.parametrize(
    ("residual", "make"),
    [(residual, make) for residual in STREAMS + SOURCES for make in steps_for(residual)],
)


@mix_cases
def test_mix_gives_up_every_input_and_nothing_else(residual: str) -> None:
    run = Run(residual, MixStep())
    assert all(is_empty(x) for x in run.inputs)
    assert not any(is_empty(tensor) for state in run.states for tensor in state)
    assert not any(is_empty(output) for output in run.outputs)


@group_cases
def test_a_group_gives_up_what_its_picture_shows(residual: str, length: int) -> None:
    run = Run(residual, GroupStep(length, NUM_SUBLAYERS))
    assert all(is_empty(x) for x in run.inputs)
    assert not any(is_empty(output) for output in run.outputs)
    assert [is_empty(front) for front in run.fronts] == [
        i % length > 0 for i in range(NUM_SUBLAYERS)
    ]
    # what the head, or the next stage, reads
    assert not any(map(is_empty, run.states[-1]))


@every_step
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_backward_finds_everything_again_bit_for_bit(
    residual: str, make: Callable[[], Step], dtype: torch.dtype
) -> None:
    run, plain = Run(residual, make(), dtype), Run(residual, plain_step, dtype)
    assert_same_gradients(run.backward(), plain.backward())
    assert_same_values(run, plain)


@mix_cases
def test_mix_fills_one_input_at_a_time(residual: str) -> None:
    run, filled = Run(residual, MixStep()), {}
    watch(run, filled)
    run.backward()
    # the test still holds the later ones, which autograd has let go
    assert filled == {i: list(range(i, NUM_SUBLAYERS)) for i in range(NUM_SUBLAYERS)}


@group_cases
def test_a_group_is_filled_when_backward_reaches_it(residual: str, length: int) -> None:
    run, filled = Run(residual, GroupStep(length, NUM_SUBLAYERS)), {}
    watch(run, filled)
    run.backward()
    first = {i: i - i % length for i in range(NUM_SUBLAYERS)}
    if residual.startswith("mhc"):
        # the first read of a group and the last write of the one before are one step of autograd
        first |= {i: i - length for i in range(length, NUM_SUBLAYERS, length)}
    assert filled == {i: list(range(first[i], NUM_SUBLAYERS)) for i in range(NUM_SUBLAYERS)}


def watch(run: Run, filled: dict[int, list[int]]) -> None:
    """Note, when the gradient of each input is there, which inputs have their memory."""

    def note(i: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            filled[i] = [j for j, x in enumerate(run.inputs) if not is_empty(x)]

        return hook

    for i, x in enumerate(run.inputs):
        x.register_hook(note(i))


@mix_cases
def test_mix_runs_every_read_once_more_and_nothing_else(residual: str) -> None:
    run = Run(residual, MixStep())
    once = dict.fromkeys(("F", "read", "write"), NUM_SUBLAYERS)
    assert run.calls == once
    run.backward()
    assert run.calls == {**once, "reread": NUM_SUBLAYERS}


@group_cases
def test_a_group_runs_all_but_its_last_write_once_more_and_never_a_sublayer(
    residual: str, length: int
) -> None:
    run = Run(residual, GroupStep(length, NUM_SUBLAYERS))
    once = dict.fromkeys(("F", "read", "write"), NUM_SUBLAYERS)
    assert run.calls == once
    run.backward()
    groups = -(-NUM_SUBLAYERS // length)
    again = NUM_SUBLAYERS - groups  # r - 1 in each group
    expected = {**once, "reread": NUM_SUBLAYERS, "write": NUM_SUBLAYERS + again}
    assert run.calls == expected


@every_step
def test_without_gradients_nothing_is_given_up_and_nothing_runs_again(
    residual: str, make: Callable[[], Step]
) -> None:
    with torch.no_grad():
        run, plain = Run(residual, make()), Run(residual, plain_step)
    assert not any(is_empty(tensor) for tensor in run.all_tensors())
    assert run.calls["reread"] == 0
    assert_same_values(run, plain)


def freeze_all(model: TinyModel) -> None:
    model.requires_grad_(False)


def freeze_first_half(model: TinyModel) -> None:
    model.shared.embedding.requires_grad_(False)
    for i in range(NUM_SUBLAYERS // 2):
        model.residuals[i].requires_grad_(False)
        model.shared.sublayers[i].requires_grad_(False)


def freeze_all_but_one_sublayer(model: TinyModel) -> None:
    model.requires_grad_(False)
    model.shared.sublayers[2].requires_grad_(True)


def freeze_all_but_residuals(model: TinyModel) -> None:
    model.requires_grad_(False)
    model.residuals.requires_grad_(True)


@every_step
@pytest.mark.parametrize(
    "prepare", [freeze_first_half, freeze_all_but_one_sublayer, freeze_all_but_residuals]
)
def test_frozen_parts_of_a_model_are_a_normal_case(
    residual: str, make: Callable[[], Step], prepare: Callable[[TinyModel], None]
) -> None:
    run = Run(residual, make(), prepare=prepare)
    plain = Run(residual, plain_step, prepare=prepare)
    gradients = run.backward()
    assert any(gradient is not None and gradient.any() for gradient in gradients.values())
    assert_same_gradients(gradients, plain.backward())
    assert_same_values(run, plain)


@every_step
def test_a_model_without_any_gradient_is_right_and_loses_nothing(
    residual: str, make: Callable[[], Step]
) -> None:
    """Nothing will call for a replay, so nothing may stay empty."""
    run = Run(residual, make(), prepare=freeze_all)
    assert not run.logits.requires_grad
    assert_same_values(run, Run(residual, plain_step, prepare=freeze_all))


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Memory must come back by counting references alone, without a search for cycles."""
    gc.disable()
    yield
    gc.enable()


def alive(watched: list[weakref.ref[Tensor]]) -> int:
    return sum(ref() is not None for ref in watched)


@every_step
@pytest.mark.usefixtures("without_collector")
def test_after_backward_nothing_is_referenced(residual: str, make: Callable[[], Step]) -> None:
    run = Run(residual, make())
    watched = run.forget()
    run.backward()
    del run.logits
    assert len(watched) > 3 * NUM_SUBLAYERS
    assert alive(watched) == 0


@every_step
@pytest.mark.usefixtures("without_collector")
def test_a_pass_that_is_dropped_before_its_backward_leaks_nothing(
    residual: str, make: Callable[[], Step]
) -> None:
    run = Run(residual, make())
    watched = run.forget()
    assert alive(watched) > 0
    del run.logits
    assert alive(watched) == 0


@every_step
@pytest.mark.usefixtures("without_collector")
def test_a_sublayer_that_raises_leaves_nothing_behind(
    residual: str, make: Callable[[], Step]
) -> None:
    watched: list[weakref.ref[Tensor]] = []

    class Watched(Run):
        def _sublayer(self, i: int, raise_at: int | None) -> Callable[[Tensor], Tensor]:
            if i == raise_at:
                watched.extend(self.forget())
                assert alive(watched) > 0
            return super()._sublayer(i, raise_at)

    failed = False
    try:
        Watched(residual, make(), raise_at=4)
    except ArithmeticError:
        failed = True
    assert failed
    assert alive(watched) == 0


@every_step
def test_passes_in_flight_together_do_not_notice_each_other(
    residual: str, make: Callable[[], Step]
) -> None:
    """As the warm-up of a pipeline: two forwards, then two backwards, in either order."""
    expected = Run(residual, plain_step).backward()
    for first in (0, 1):
        runs = [Run(residual, make()), Run(residual, make())]
        for run in (runs[first], runs[1 - first]):
            assert_same_gradients(run.backward(), expected)


class NormLikeTheHost(torch.nn.Module):
    """A sublayer without bias and dropout, which reads x again in a hook on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.read_again: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output = torch.tanh(x)
        output.register_hook(lambda _: self.read_again.append(x.clone()))
        return output


@pytest.mark.parametrize("residual", [STREAMS[2], SOURCES[1]])
def test_the_input_is_back_before_hooks_on_the_sublayer_s_output_run(residual: str) -> None:
    """The host recomputes a norm from x in such a hook; without bias and dropout, what the layer
    returns is the very tensor that the host has hooked, and of two hooks the first goes first."""
    model = TinyModel(ResidualConfig.parse(residual), random_residual=0.5)
    for make in steps_for(residual):
        sublayers = [NormLikeTheHost() for _ in range(NUM_SUBLAYERS)]
        inputs: list[Tensor] = []
        for step in (plain_step, make()):
            state: Any = model.open(tokens())
            for module, sublayer in zip(model.residuals, sublayers, strict=True):
                if step is plain_step:
                    inputs.append(module.read(state)[0].detach())
                state = step(module, state, sublayer)
            model.close(state).sum().backward()
        for x, sublayer in zip(inputs, sublayers, strict=True):
            assert len(sublayer.read_again) == 2
            assert all(torch.equal(again, x) for again in sublayer.read_again)
