# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: reading and writing are token by token, so only gradients are summed."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_residuals.mcore.route import live_routes
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    run_toy,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_training import train_toy
from tests.mcore.parallel.cases import (
    BLOCKS,
    FLOAT64,
    MHC,
    assert_mechanism_trains,
    assert_same_step,
    block_spec_for,
)
from tests.mcore.parallel.context_attention import use_gathered_attention

pytestmark = pytest.mark.timeout(120)

SIZES = dict(FLOAT64, num_layers=4, num_microbatches=2)
LAYOUTS = {
    "cp2": dict(cp=2),
    "cp2-dp2": dict(cp=2, dp=2),
    "cp2-tp2-sp": dict(cp=2, tp=2, sequence_parallel=True),
    "cp2-pp2-vpp2": dict(cp=2, pp=2, vpp=2),
}


def spec_for(residual: str | None) -> Any:
    return block_spec_for(residual, use_gathered_attention)


@functools.cache
def one_process(residual: str | None) -> ToyResult:
    return run_toy(ToyGPT(**SIZES), spec_for(residual))


def test_the_attention_of_these_tests_is_the_hosts_own_on_one_rank() -> None:
    ours, host = one_process(None), run_toy(ToyGPT(**SIZES), block_spec_for(None))
    assert ours.losses == pytest.approx(host.losses, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("residual", [MHC, BLOCKS])
def test_context_parallelism_equals_one_process(residual: str, layout: dict[str, Any]) -> None:
    actual = train_toy(ToyGPT(**SIZES, **layout), spec_for(residual))
    assert_same_step(actual, one_process(residual))
    assert_mechanism_trains(actual.grads)


def traffic(toy: ToyGPT) -> tuple[str, Counter[tuple[str, int]]]:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    train_step(chunks, toy)
    (route,) = live_routes()
    return str(route.plan), route.step.received


def test_the_plan_is_the_same_and_each_rank_sends_its_own_tokens() -> None:
    whole = run_ranks(2, traffic, ToyGPT(**SIZES, pp=2, vpp=2))
    parts = run_ranks(4, traffic, ToyGPT(**SIZES, pp=2, vpp=2, cp=2))
    assert {plan for plan, _ in parts} == {plan for plan, _ in whole}
    halved = [{hop: size // 2 for hop, size in sizes.items()} for _, sizes in whole]
    # ranks count over context parallelism first, then over the pipeline
    assert [dict(sizes) for _, sizes in parts] == [halved[0], halved[0], halved[1], halved[1]]
    assert all(sizes for sizes in halved) and torch.float64.itemsize == 8
