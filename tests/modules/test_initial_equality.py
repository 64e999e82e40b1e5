# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""At initialisation every mechanism is the plain pre-norm model: same logits, same gradients.

One assertion that catches any source lost or doubled, any stream weighted wrongly, and any head
that does not fit. It cannot see block boundaries in the wrong place: test_depth_recursion does.
"""

from __future__ import annotations

import pytest
import torch

from megatron_residuals.config import ResidualConfig
from megatron_residuals.modules import StreamState
from megatron_residuals.testing import assert_close
from tests.modules.tiny_model import (
    NUM_LAYERS,
    NUM_SUBLAYERS,
    Outcome,
    TinyModel,
    outcome,
    plain_outcome,
    tokens,
)

TINY_EPS = 1e-25


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return plain_outcome()


def initial_outcome(config: ResidualConfig) -> Outcome:
    model = TinyModel(config)
    return outcome(model(tokens()), model.shared.named_parameters())


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    assert_close(actual.logits, expected.logits, dtype=torch.float64, kind="same_math")
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.abs().max() > 1e-3, f"{name} has no gradient to compare"
        assert_close(
            actual.gradients[name], gradient, dtype=torch.float64, kind="same_math", name=name
        )


def test_the_plain_residual_is_bitwise_the_one_written_by_hand(plain: Outcome) -> None:
    actual = initial_outcome(ResidualConfig("residual"))
    assert torch.equal(actual.logits, plain.logits)
    for name, gradient in plain.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name


def test_zero_queries_make_full_attnres_the_plain_model(plain: Outcome) -> None:
    assert_equal(initial_outcome(ResidualConfig("attnres")), plain)


@pytest.mark.parametrize("block_sublayers", range(1, NUM_SUBLAYERS + 2))
def test_zero_queries_make_block_attnres_the_plain_model_for_every_block_length(
    block_sublayers: int, plain: Outcome
) -> None:
    config = ResidualConfig("block_attnres", block_sublayers=block_sublayers)
    assert_equal(initial_outcome(config), plain)


@pytest.mark.parametrize("block_layers", [None, *range(1, NUM_LAYERS + 2)])
def test_zero_queries_make_blocks_of_whole_layers_the_plain_model(
    block_layers: int | None, plain: Outcome
) -> None:
    assert_equal(initial_outcome(ResidualConfig("block_attnres", block_layers=block_layers)), plain)


@pytest.mark.parametrize("contraction", ["mean", "sum", "learned"])
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("initialisation", ["a6", "symmetric"])
@pytest.mark.parametrize("convention", ["paper", "dsv4"])
def test_initial_mhc_is_the_plain_model(
    convention: str, initialisation: str, streams: int, contraction: str, plain: Outcome
) -> None:
    """Rows of H_res sum to one and H_post is one, so all streams stay equal to the plain one."""
    config = ResidualConfig(
        "mhc",
        streams=streams,
        mhc_convention=convention,
        mhc_init=initialisation,
        mhc_eps=TINY_EPS,
        contraction=contraction,
    )
    assert_equal(initial_outcome(config), plain)


def test_initial_mhc_with_the_eps_of_dsv4_is_the_plain_model_up_to_that_eps(plain: Outcome) -> None:
    actual = initial_outcome(ResidualConfig("mhc", mhc_convention="dsv4"))
    error = (actual.logits - plain.logits).abs().max() / plain.logits.abs().max()
    assert 1e-9 < error < 1e-4


@pytest.mark.parametrize("contraction", ["mean", "sum", "learned"])
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"hc_norm": "rmsnorm"}, {"hc_dynamic": False}])
def test_initial_hc_is_the_plain_model(
    options: dict[str, object], streams: int, contraction: str, plain: Outcome
) -> None:
    config = ResidualConfig("hc", streams=streams, contraction=contraction, **options)  # type: ignore[arg-type]
    assert_equal(initial_outcome(config), plain)


@pytest.mark.parametrize("dynamic", [True, False])
def test_every_stream_of_initial_hc_is_bitwise_the_plain_stream(dynamic: bool) -> None:
    config = ResidualConfig("hc", streams=3, hc_dynamic=dynamic)
    states = TinyModel(config).states(tokens())
    plain_states = TinyModel(ResidualConfig("residual")).states(tokens())
    for state, plain_state in zip(states, plain_states, strict=True):
        assert isinstance(state, StreamState)
        for i in range(3):
            assert torch.equal(state.streams[..., i, :], plain_state[0])
