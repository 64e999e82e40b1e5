# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model whose blocks are read in two phases is the model, wherever a block is cut."""

from __future__ import annotations

import pytest
import torch

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms.sources.module import DepthAttention, open_reads
from megatron_residuals.modules import ResidualState, SourceState
from megatron_residuals.pipeline.two_phase import cut_at_blocks, reads_in_two_phases
from megatron_residuals.testing import assert_close
from tests.modules.tiny_model import NUM_LAYERS, NUM_SUBLAYERS, Outcome, TinyModel, outcome, tokens

LENGTHS = [2, 3, 4, 5, 6]
every_length = pytest.mark.parametrize("length", LENGTHS)


def model_of(length: int) -> TinyModel:
    config = ResidualConfig("block_attnres", block_sublayers=length)
    return TinyModel(config, random_residual=0.5)


def readers_of(model: TinyModel, part: range) -> list[DepthAttention]:
    return [model.residuals[i] for i in part]  # type: ignore[misc]


def run(model: TinyModel, cuts: tuple[int, ...] = ()) -> Outcome:
    """All blocks in two phases; ``cuts`` are sublayers in front of which a pass ends besides."""
    depth = model.config.depth_map(NUM_LAYERS)
    assert depth is not None
    state: ResidualState = model.open(tokens())
    bounds = [0, *cuts, NUM_SUBLAYERS]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for part in cut_at_blocks(depth, range(start, stop)):
            assert isinstance(state, SourceState)
            state = open_reads(state, readers_of(model, part))
            for i in part:
                state = model.step(state, i)
            assert isinstance(state, SourceState) and not state.reads and state.output is None
    return outcome(model.close(state), model.named_parameters())


@every_length
def test_logits_and_all_gradients_are_those_of_one_phase(length: int) -> None:
    model = model_of(length)
    expected = outcome(model(tokens()), model.named_parameters())
    actual = run(model)
    assert_close(actual.logits, expected.logits, dtype=torch.float64, kind="same_math")
    for name, gradient in expected.gradients.items():
        found = actual.gradients[name]
        assert_close(found, gradient, dtype=torch.float64, kind="same_math", name=name)


@every_length
@pytest.mark.parametrize("cuts", [(1,), (3,), (1, 2, 3, 4, 5)], ids=str)
def test_a_cut_inside_a_block_changes_no_bit(length: int, cuts: tuple[int, ...]) -> None:
    model = model_of(length)
    whole, cut = run(model), run(model, cuts)
    assert torch.equal(whole.logits, cut.logits)
    for name, gradient in whole.gradients.items():
        assert torch.equal(cut.gradients[name], gradient), name


@every_length
def test_what_a_prepared_state_shows_to_a_reader_is_what_one_phase_reads(length: int) -> None:
    model, prepared = model_of(length), model_of(length)
    depth = model.config.depth_map(NUM_LAYERS)
    assert depth is not None
    state, other = model.open(tokens()), prepared.open(tokens())
    with torch.no_grad():
        for i in range(NUM_SUBLAYERS):
            assert isinstance(state, SourceState) and isinstance(other, SourceState)
            if depth.opens_block(i):
                part = cut_at_blocks(depth, range(i, NUM_SUBLAYERS))[0]
                other = open_reads(other, readers_of(prepared, part))
            assert len(state.readable) == len(other.readable) == depth.num_read(i)
            for mine, theirs in zip(other.readable, state.readable, strict=True):
                assert_close(mine, theirs, dtype=torch.float64, kind="same_math")
            state, other = model.step(state, i), prepared.step(other, i)


def test_modules_are_called_before_their_parameters_are_read() -> None:
    """A wrapper that gathers parameters when a module is called must not come too late."""
    model = model_of(4)
    called: list[int] = []
    for i, module in enumerate(model.residuals):
        module.register_forward_pre_hook(lambda *_, i=i: called.append(i))
    state = model.open(tokens())
    assert isinstance(state, SourceState)
    state = open_reads(state, readers_of(model, range(4)))
    assert called == [0, 1, 2, 3]
    model.step(state, 0)
    assert called == [0, 1, 2, 3]  # phase 2 uses no parameter
    model.step(model.open(tokens()), 0)
    assert called == [0, 1, 2, 3, 0]


def test_reading_again_gives_the_same_and_holds_no_value_of_another_reader() -> None:
    model = model_of(4)
    state: ResidualState = model.open(tokens())
    assert isinstance(state, SourceState)
    state = open_reads(state, readers_of(model, range(4)))
    for i in range(4):
        x, pending = model.residuals[i].read(state)
        again = model.residuals[i].rereader(pending)  # type: ignore[operator]
        held = again.args[0]
        assert held.reads == () and held.output is None
        with torch.no_grad():
            assert torch.equal(again(), x)
        state = model.residuals[i].write(pending, model.shared.sublayers[i](x))  # type: ignore[operator]


def test_two_phases_are_chosen_by_depth_alone() -> None:
    depth = DepthMap(num_layers=5, block_sublayers=3)  # 3 + 3 + 3 + 1 sublayers
    chosen = {
        c: [reads_in_two_phases(c, depth, i) for i in range(10)] for c in ("auto", "on", "off")
    }
    # the first block has one finished source and too few sublayers, the last one sublayer
    assert chosen["auto"] == [False] * 3 + [True] * 6 + [False]
    assert all(reads_in_two_phases("auto", DepthMap(6, 4), i) for i in range(12))
    assert chosen["on"] == [True] * 9 + [False]
    assert not any(chosen["off"])
    assert not reads_in_two_phases("auto", DepthMap(3, 1), 4)


def test_two_phases_of_full_attnres_are_refused() -> None:
    with pytest.raises(ValueError, match="two_phase is 'on', but every block has one sublayer"):
        reads_in_two_phases("on", DepthMap(3, 1), 0)
