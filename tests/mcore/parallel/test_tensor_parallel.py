# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: parameters of a mechanism are whole on every rank and stay equal.

With sequence parallelism a rank sees its tokens only and the gradients are summed, once; without,
every rank sees all tokens and they must not be. Both sums are the host's own here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import keep_residual_init
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel
from megatron_residuals.testing.toy_training import Trained, Training, train_toy
from megatron_residuals.testing.toy_weights import named_globally
from tests.mcore.parallel.cases import (
    BLOCKS,
    FLOAT64,
    FULL,
    HC,
    MHC,
    MHC_DSV4,
    assert_mechanism_trains,
    assert_same,
    assert_same_step,
    block_spec_for,
    is_mechanism,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

SIZES = dict(FLOAT64, num_microbatches=2)
THREE_STEPS = Training(steps=3)
LAYOUTS = {
    "tp2": dict(tp=2),
    "tp2-sp": dict(tp=2, sequence_parallel=True),
    "tp2-sp-pp2-dp2": dict(tp=2, sequence_parallel=True, pp=2, dp=2, num_layers=4),
}


@functools.cache
def one_process(residual: str, num_layers: int) -> Trained:
    toy = ToyGPT(**{**SIZES, "num_layers": num_layers})
    return train_toy(toy, block_spec_for(residual), THREE_STEPS)


CASES = [
    pytest.param(MHC_DSV4, "tp2", marks=pytest.mark.newest),
    (MHC_DSV4, "tp2-sp"),
    pytest.param(MHC_DSV4, "tp2-sp-pp2-dp2", marks=pytest.mark.newest),
    (BLOCKS, "tp2-sp-pp2-dp2"),
    pytest.param(FULL, "tp2-sp", marks=pytest.mark.newest),
    (HC, "tp2-sp"),
]


@pytest.mark.parametrize(("residual", "layout"), CASES)
def test_gradients_and_three_optimizer_steps_equal_one_process(residual: str, layout: str) -> None:
    toy = ToyGPT(**{**SIZES, **LAYOUTS[layout]})
    # merging the ranks' results already asserts that they agree on what several hold, bit for bit
    actual = train_toy(toy, block_spec_for(residual), THREE_STEPS)
    expected = one_process(residual, toy.num_layers)
    assert_same_step(actual, expected)
    assert_mechanism_trains(actual.grads)
    assert_same(actual.parameters, expected.parameters, kind="reordered")


def initial_values(toy: ToyGPT) -> dict[tuple[str, str], torch.Tensor]:
    setup_parallel(toy)
    values = {}
    for residual in (HC, MHC, MHC_DSV4, BLOCKS):
        # what the ranks draw from here on differs, as it does inside the host's linear layers
        with get_cuda_rng_tracker().fork():
            (chunk,) = build_chunks(toy, block_spec_for(residual), initialise=keep_residual_init)
        for name, parameter in named_globally(chunk):
            if is_mechanism(name):
                values[residual, name] = parameter.detach()
    return values


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu-init", "device-init"])
def test_initial_values_are_the_same_on_every_rank(on_cpu: bool) -> None:
    overrides: dict[str, Any] = dict(use_cpu_initialization=on_cpu)
    first, second = run_ranks(2, initial_values, ToyGPT(**SIZES, tp=2, config_overrides=overrides))
    assert first.keys() == second.keys() and len({residual for residual, _ in first}) == 4
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
