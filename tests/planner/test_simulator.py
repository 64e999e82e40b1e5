# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The simulator's clock against closed forms, and programs that cannot end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import Message
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.pipeline.schedule import Pass, schedule
from megatron_residuals.planner.simulate.deadlock import Deadlock, OutOfOrder
from megatron_residuals.planner.simulate.engine import Timeline, play
from megatron_residuals.planner.simulate.interleaved import OVERLAPS
from megatron_residuals.planner.simulate.links import FREE, NO_COST, Link, Network
from megatron_residuals.planner.simulate.program import programs
from megatron_residuals.planner.simulate.steps import Call, Program

FORWARD_S, BACKWARD_S = 1.0, 2.0  # of one stage; halves and quarters of it are exact in binary
SETTINGS = [*itertools.product(OVERLAPS, (True, False))]


def run(
    layout: StageLayout,
    rank_programs: list[Program],
    network: Network = NO_COST,
    plan: TransferPlan | None = None,
) -> Timeline:
    """Equal stages; messages of one byte, or of as many as the plan has rows."""
    return play(
        layout,
        rank_programs,
        lambda step: FORWARD_S if step.forward else BACKWARD_S,
        lambda message: 1 if plan is None else plan.rows_in(message.boundary),
        network,
    )


def seconds_per_message(seconds: float) -> Network:
    return Network(FREE, Link(1 / seconds, 0))


def pipelines() -> Iterator[tuple[StageLayout, int, int | None, str, bool]]:
    """Small ones of every kind: ranks, chunks, whole and broken micro-batch groups, settings."""
    for ranks, count in itertools.product((1, 2, 3, 4), (1, 2, 3, 7)):
        yield StageLayout.even(ranks, ranks), count, None, "steady", True
    groups = ((2, 2, 2), (2, 4, None), (2, 5, 3), (3, 3, 3), (3, 8, 5), (4, 4, 4), (4, 14, 5))
    for (ranks, count, group), chunks, setting in itertools.product(groups, (2, 3), SETTINGS):
        yield StageLayout.even(ranks * chunks, ranks, chunks), count, group, *setting


def test_no_schedule_deadlocks_and_each_runs_the_passes_of_the_plan_in_order() -> None:
    for layout, count, group, overlap, waits in pipelines():
        case = (layout, count, group, overlap, waits)
        rank_programs = programs(layout, count, group, overlap=overlap, waits_for_sends=waits)
        timeline = run(layout, rank_programs, seconds_per_message(0.25))
        for rank in range(layout.num_ranks):
            passes = [span.step for span in timeline.passes if span.rank == rank]
            assert passes == list(schedule(layout, rank, count, group)), case
        assert len(timeline.messages) == 2 * (layout.num_stages - 1) * count, case


def test_every_pass_starts_behind_its_message_and_no_rank_does_two_things_at_once() -> None:
    for layout, count, group, overlap, waits in pipelines():
        rank_programs = programs(layout, count, group, overlap=overlap, waits_for_sends=waits)
        timeline = run(layout, rank_programs, seconds_per_message(0.25))
        arrived = {span.message: span.end_s for span in timeline.messages}
        left = {span.message: span.start_s for span in timeline.messages}
        ends = dict.fromkeys(range(layout.num_ranks), 0.0)
        for span in sorted(timeline.passes, key=lambda span: span.start_s):
            forward, micro_batch, stage = span.step
            assert span.start_s >= ends[span.rank]
            ends[span.rank] = span.end_s
            direction, ahead = ("forward", 0) if forward else ("backward", 1)
            arriving = Message(direction, stage + ahead, micro_batch)
            leaving = Message(direction, stage + 1 - ahead, micro_batch)
            assert arrived.get(arriving, 0.0) <= span.start_s
            assert left.get(leaving, span.end_s) >= span.end_s


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (4, 4), (4, 12), (8, 8)])
def test_the_bubble_of_1f1b_is_that_of_its_warm_up_and_cool_down(ranks: int, count: int) -> None:
    layout = StageLayout.even(ranks, ranks)
    step_s = run(layout, programs(layout, count)).step_s
    ideal_s = count * (FORWARD_S + BACKWARD_S)
    assert (step_s - ideal_s) / ideal_s == pytest.approx((ranks - 1) / count, rel=1e-12)


@pytest.mark.parametrize(("overlap", "waits"), SETTINGS)
@pytest.mark.parametrize(
    ("ranks", "chunks", "count", "group"),
    [(2, 2, 2, None), (2, 3, 8, None), (4, 2, 8, None), (4, 3, 9, 5), (8, 4, 16, None)],
)
def test_chunks_divide_the_bubble(
    ranks: int, chunks: int, count: int, group: int | None, overlap: str, waits: bool
) -> None:
    layout = StageLayout.even(ranks * chunks, ranks, chunks)
    rank_programs = programs(layout, count, group, overlap=overlap, waits_for_sends=waits)
    ideal_s = count * chunks * (FORWARD_S + BACKWARD_S)
    bubble = (run(layout, rank_programs).step_s - ideal_s) / ideal_s
    assert bubble == pytest.approx((ranks - 1) / (count * chunks), rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "count", "messages"),
    [
        # one micro-batch crosses every boundary and comes back
        *((ranks, 1, 2 * (ranks - 1)) for ranks in (2, 3, 4, 8)),
        # two ranks stop for one exchange per micro-batch, and for the last gradient
        *((2, count, count + 1) for count in (2, 4, 7)),
        # a rank with two neighbours stops for one with each
        *((ranks, count, 2 * count + 2 * ranks - 5) for ranks in (3, 4, 8) for count in (2, 5)),
    ],
)
def test_1f1b_exposes_every_exchange(ranks: int, count: int, messages: int) -> None:
    layout = StageLayout.even(ranks, ranks)
    rank_programs = programs(layout, count)
    free_s, message_s = run(layout, rank_programs).step_s, 0.25
    step_s = run(layout, rank_programs, seconds_per_message(message_s)).step_s
    assert (step_s - free_s) / message_s == messages


def test_overlap_hides_the_messages_of_the_steady_part() -> None:
    layout = StageLayout.even(8, 4, 2)

    def exposed(count: int, overlap: str, waits: bool) -> float:
        rank_programs = programs(layout, count, overlap=overlap, waits_for_sends=waits)
        free_s = run(layout, rank_programs).step_s
        return (run(layout, rank_programs, seconds_per_message(0.25)).step_s - free_s) / 0.25

    # what eight more micro-batches cost: 16 passes each way, of which overlap leaves nothing, or,
    # where the host waits for its outputs, the sends of the forwards
    more = {
        setting: exposed(16, *setting) - exposed(8, *setting)
        for setting in itertools.product(OVERLAPS, (True, False))
    }
    assert more == {
        ("off", True): 40,
        ("off", False): 40,
        ("steady", True): 16,
        ("steady", False): 0,
        ("all", True): 16,
        ("all", False): 0,
    }


def test_a_step_with_endless_messages_takes_as_long_as_its_busiest_port() -> None:
    layout = StageLayout.even(8, 4, 2)
    rank_programs = programs(layout, 8, waits_for_sends=False)
    message_s = 2.0**20
    timeline = run(layout, rank_programs, seconds_per_message(message_s))
    per_port = max(
        sum(span.sender == rank for span in timeline.messages) for rank in range(layout.num_ranks)
    )
    assert per_port == 32
    assert per_port <= timeline.step_s / message_s <= 1.2 * per_port


def test_messages_through_one_port_follow_each_other_and_latency_is_added() -> None:
    layout = StageLayout.even(6, 3, 2)
    network = Network(FREE, Link(2.0, 0.5))
    timeline = run(layout, programs(layout, 6), network)
    for rank, end in itertools.product(range(3), ("sender", "receiver")):
        spans = sorted(
            (span.start_s, span.end_s) for span in timeline.messages if getattr(span, end) == rank
        )
        assert all(b - a == 1.0 for a, b in spans)  # half a second of bytes, half of latency
        assert all(b - 0.5 <= c for (_, b), (c, _) in itertools.pairwise(spans))


def test_ranks_of_one_node_use_its_own_links() -> None:
    layout = StageLayout.even(8, 4, 2)
    network = Network(Link(4.0, 0), Link(1.0, 0), ranks_per_node=2)
    timeline = run(layout, programs(layout, 4), network)
    lengths = {
        (span.sender, span.receiver): span.end_s - span.start_s for span in timeline.messages
    }
    assert {hop for hop, length in lengths.items() if length == 0.25} == {
        (0, 1),
        (1, 0),
        (2, 3),
        (3, 2),
    }
    assert {hop for hop, length in lengths.items() if length == 1} == {
        (1, 2),
        (2, 1),
        (3, 0),
        (0, 3),
    }


@pytest.mark.parametrize("transport", ["full", "delta"])
def test_the_bytes_on_the_wire_are_those_of_the_plan(transport: str) -> None:
    layout = StageLayout(4, 2, (3, 2, 0, 2, 1, 2, 3, 1))
    plan = TransferPlan.for_sources(layout, DepthMap(14, 3), transport)
    timeline = run(layout, programs(layout, 7, 7), plan=plan)
    assert sum(span.bytes for span in timeline.messages) == 2 * 7 * plan.rows
    for hop in plan.boundaries:
        crossed = [span for span in timeline.messages if span.message.boundary == hop.stage]
        assert sorted(span.message.micro_batch for span in crossed) == sorted([*range(7)] * 2)
        assert {(span.sender, span.receiver) for span in crossed} == {
            (hop.sender_rank, hop.receiver_rank),
            (hop.receiver_rank, hop.sender_rank),
        }


def test_two_ranks_that_both_receive_first_are_reported_as_a_cycle() -> None:
    layout = StageLayout.even(2, 2)
    rank_programs = [
        [part for step in program for part in receive_first(step)]
        for program in programs(layout, 3)
    ]
    with pytest.raises(Deadlock) as failure:
        run(layout, rank_programs)
    assert str(failure.value).splitlines() == [
        "deadlock, ranks 0 -> 1 -> 0:",
        "  rank 0 waits to receive the backward message of micro-batch 0, stages 1 -> 0, from "
        "rank 1",
        "  rank 1 waits to receive the forward message of micro-batch 1, stages 0 -> 1, from "
        "rank 0",
    ]


def receive_first(step: Pass | Call | object) -> list[object]:
    """An exchange as a receive and then a send, each waited for."""
    if isinstance(step, Call) and step.sends and step.receives:
        return [Call((), step.receives, True), Call(step.sends, (), True)]
    return [step]


def test_a_cycle_of_more_ranks_is_named_without_those_that_wait_for_it() -> None:
    layout = StageLayout.even(6, 3, 2)
    waiting = [Call((), (Message("forward", stage, 0),), True) for stage in (3, 1, 2)]
    with pytest.raises(Deadlock) as failure:
        run(layout, [[step] for step in waiting])
    assert [each.rank for each in failure.value.cycle] == [0, 2, 1]
    line = StageLayout.even(3, 3)
    circle = [
        [Call((Message("forward", 1, 0),), (), True)],
        [Call((Message("backward", 1, 0),), (), True)],
        [Call((), (Message("forward", 2, 0),), True)],
    ]
    with pytest.raises(Deadlock) as failure:
        run(line, circle)
    assert {each.rank for each in failure.value.cycle} == {0, 1}
    assert str(failure.value).splitlines()[-1] == "  and 1 of 3 ranks wait for those"


def test_a_rank_that_waits_for_one_that_has_finished_is_reported() -> None:
    layout = StageLayout.even(2, 2)
    first, last = programs(layout, 2)
    with pytest.raises(Deadlock, match="ranks wait for \\[0\\], which have finished") as failure:
        run(layout, [first[:-2], last])
    assert not failure.value.cycle


def test_ranks_that_disagree_on_the_next_message_are_reported() -> None:
    layout = StageLayout.even(2, 2)
    first, last = programs(layout, 2)
    swap = {0: 1, 1: 0}
    swapped = [
        step._replace(sends=tuple(m._replace(micro_batch=swap[m.micro_batch]) for m in step.sends))
        if isinstance(step, Call)
        else step
        for step in first
    ]
    with pytest.raises(OutOfOrder, match="rank 0 sends the forward message of micro-batch 1"):
        run(layout, [swapped, last])


@pytest.mark.parametrize(
    ("count", "group", "overlap", "words"),
    [
        (0, None, "steady", "num_microbatches is 0"),
        (3, None, "steady", "leave a last group of 1"),
        (4, None, "on", "allowed: off, steady, all"),
    ],
)
def test_what_the_host_refuses_is_refused(
    count: int, group: int | None, overlap: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        programs(StageLayout.even(4, 2, 2), count, group, overlap=overlap)


def test_links_without_a_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="links between nodes have 0 bytes/s"):
        Network(FREE, Link(0, 0))
