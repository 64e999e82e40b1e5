# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Depth sources through the real pipeline: every layout, full and delta, equal to one process."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch

from megatron_residuals.mcore.route import live_routes
from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import full_grads

NUM_LAYERS = 12
SMALL = dict(num_layers=NUM_LAYERS, hidden_size=16, num_heads=2, seq_length=6, dtype=torch.float64)
MICROBATCHES = {2: 6, 4: 4}  # by pipeline ranks
PIPELINES = [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2)]
BLOCKS = {"aligned": "block_layers=3", "cut": "block_sublayers=5", "full": "block_sublayers=1"}


def layouts(pp: int, vpp: int) -> dict[str, dict[str, Any]]:
    """Host options that spread twelve layers over the stages in different ways."""
    stages = pp * vpp
    each = NUM_LAYERS // stages
    uneven = ["t" * (each + 1), "t" * (each - 1)] + ["t" * each] * (stages - 2)
    uneven[-1] += "t" * (NUM_LAYERS - sum(map(len, uneven)))
    filled = stages - 1
    empty = ["t" * (NUM_LAYERS // filled)] * filled
    empty[0] += "t" * (NUM_LAYERS - sum(map(len, empty)))
    empty.insert(max(1, stages // 2), "")
    alone = ["t" * (NUM_LAYERS // max(1, stages - 2))] * max(1, stages - 2)
    alone[-1] += "t" * (NUM_LAYERS - sum(map(len, alone)))
    alone = ["", *alone, ""][:stages] if stages > 2 else ["", alone[0]]
    named = {"even": None, "uneven": uneven, "empty": empty, "standalone": alone}
    if NUM_LAYERS % stages:
        del named["even"]
    return {
        name: {} if cut is None else {"pipeline_model_parallel_layout": f"E{'|'.join(cut)}L"}
        for name, cut in named.items()
    }


class Case(NamedTuple):
    """One way through the host's schedules."""

    pp: int
    vpp: int
    layout: dict[str, Any]
    blocks: str
    schedule: dict[str, Any]


def schedules(pp: int, vpp: int) -> list[dict[str, Any]]:
    freed = dict(deallocate_pipeline_outputs=True)
    if vpp == 1:
        return [{}, freed, dict(batch_p2p_comm=False)]
    group = dict(microbatch_group_size_per_vp_stage=4)  # six micro-batches are then four and two
    batched = dict(overlap_p2p_comm=False, batch_p2p_comm=True)
    flushed = dict(overlap_p2p_comm_warmup_flush=True)
    return [
        {},
        {**freed, **group},
        {**batched, **freed},
        {**flushed, **freed},
        {**batched, **group},
    ]


def cases() -> dict[str, Case]:
    """Every pipeline with every layout, kind of block and schedule; these take turns."""
    found = {}
    for shift, (pp, vpp) in enumerate(PIPELINES):
        cuts, ways = list(layouts(pp, vpp).items()), list(enumerate(schedules(pp, vpp)))
        for turn in range(max(len(cuts), len(ways) + 1)):
            # with these shifts most pairs of the three meet
            name, layout = cuts[(turn + 3 * shift) % len(cuts)]
            kind, blocks = list(BLOCKS.items())[turn % len(BLOCKS)]
            number, schedule = ways[(turn + 2 * shift) % len(ways)]
            case = Case(pp, vpp, layout, blocks, schedule)
            found[f"pp{pp}-vpp{vpp}-{name}-{kind}-{number}"] = case
    return found


CASES = cases()


@functools.cache
def one_process(blocks: str, num_microbatches: int) -> ToyResult:
    toy = ToyGPT(num_microbatches=num_microbatches, **SMALL)
    return run_toy(toy, spec_for(f"block_attnres({blocks})"))


def both_transports(case: Case) -> dict[str, tuple[ToyResult, dict[str, Any]]]:
    """A short step and one more, each transport, on one rank; the result and what it moved."""
    toy = ToyGPT(
        num_microbatches=MICROBATCHES[case.pp],
        pp=case.pp,
        vpp=case.vpp if case.vpp > 1 else None,
        config_overrides={**case.layout, **case.schedule},
        **SMALL,
    )
    setup_parallel(toy)
    results = {}
    for transport in ("full", "delta"):
        spec = spec_for(f"block_attnres({case.blocks}, transport={transport!r})")
        chunks = build_chunks(toy, spec)
        train_step(chunks, dataclasses.replace(toy, num_microbatches=4))
        losses = train_step(chunks, toy)
        (route,) = [route for route in live_routes() if route.residual.transport == transport]
        moved = dict(
            received=dict(route.step.received),
            cached=len(route.step.cache),
            waiting=len(route.step.outbox),
            planned=planned_bytes(route, toy),
        )
        results[transport] = (ToyResult(losses, full_grads(chunks)), moved)
    return results


def planned_bytes(route: Any, toy: ToyGPT) -> dict[tuple[str, int], int]:
    """Bytes that a rank is to receive in a step, from the plan."""
    row_bytes = toy.seq_length * toy.micro_batch_size * toy.hidden_size * toy.dtype.itemsize
    planned = {}
    for boundary in route.plan.boundaries:
        size = boundary.rows * row_bytes * toy.num_microbatches
        if boundary.receiver_rank == route.rank:
            planned["forward", boundary.stage] = size
        if boundary.sender_rank == route.rank:
            planned["backward", boundary.stage] = size
    return planned


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sources_cross_the_pipeline_unchanged_and_as_planned(case: Case) -> None:
    ranks = run_ranks(case.pp, both_transports, case)
    expected = one_process(case.blocks, MICROBATCHES[case.pp])
    for transport, kind in (("full", "exact"), ("delta", "same_math")):
        actual = merge([result[transport][0] for result in ranks])
        assert actual.losses == expected.losses
        assert actual.grads.keys() == expected.grads.keys()
        for name, gradient in expected.grads.items():
            assert_close(actual.grads[name], gradient, dtype=torch.float64, kind=kind, name=name)
        for _, moved in (result[transport] for result in ranks):
            assert moved["received"] == moved["planned"]
            assert moved["cached"] == 0
            assert moved["waiting"] == 0
