# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transfer plans: figures, a literal grid, and small pipelines walked stage by stage."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.plan import StageLayout, TransferPlan

Value = frozenset[object]  # what was summed into a tensor; two tensors are equal if these are

FIGURES = [
    # layers, block layers, layout, rows full and delta, widest hop full and delta
    (96, 12, StageLayout.even(96, 8, 4), (167, 77), (9, 3)),
    (48, 6, StageLayout.even(48, 8, 2), (79, 55), (9, 5)),
    (16, 3, StageLayout(2, 2, (4, 4, 4, 4)), (12, 7), (5, 3)),
    (32, 4, StageLayout.even(32, 4, 2), (35, 21), (8, 4)),
    (93, 12, StageLayout(8, 1, (12,) * 5 + (11,) * 3), (35, 35), (8, 8)),
    (8, 2, StageLayout.even(8, 2, 2), (9, 4), (4, 2)),
]

EIGHT_LAYERS = """\
8 layers, blocks of 4 sublayers (4 blocks), P=2, V=2, 2 layers per stage, transport delta

   hop     ranks  layers before  holds  sends  partial  rows  full
0 -> 1  r0 -> r1              2  -      s0     s1          2     2
1 -> 2  r1 -> r0              4  s0 s1  -      s2          1     3
2 -> 3  r0 -> r1              6  s0-s2  -      s3          1     4

s0 is the embedding; ~ marks a partial that is still growing.
rows of [s, b, h] per micro-batch, forward (the backward moves as many): full 9, delta 4
widest hop: full 4, delta 2
kept on a rank per micro-batch, at most: 3"""

STAND_ALONE_ENDS = """\
5 layers, blocks of 3 sublayers (4 blocks), P=2, V=3, 0 to 2 layers per stage, transport delta

   hop     ranks  layers before  holds  sends  partial  rows  full    bytes
0 -> 1  r0 -> r1              0  -      -      s0          1     1  1.5 KiB
1 -> 2  r1 -> r0              2  s0     s1     s2~         2     3  3.0 KiB
2 -> 3  r0 -> r1              3  -      -      s2          1     3  1.5 KiB
3 -> 4  r1 -> r0              3  s0 s1  -      s2          1     3  1.5 KiB
4 -> 5  r0 -> r1              5  -      -      hidden      1     1  1.5 KiB

s0 is the embedding; ~ marks a partial that is still growing.
rows of [s, b, h] per micro-batch, forward (the backward moves as many): full 11 (16.5 KiB), delta 6 (9.0 KiB)
widest hop: full 3 (4.5 KiB), delta 2 (3.0 KiB)
kept on a rank per micro-batch, at most: 2 (3.0 KiB)"""  # noqa: E501

FOUR_STREAMS = """\
4 layers, 4 stream(s), P=2, V=2, 0 to 2 layers per stage, transport full

   hop     ranks  layers before  carries      rows
0 -> 1  r0 -> r1              0  embedding       1
1 -> 2  r1 -> r0              2  4 stream(s)     4
2 -> 3  r0 -> r1              4  hidden          1

rows of [s, b, h] per micro-batch, forward (the backward moves as many): 6
widest hop: 4"""


def small_layouts() -> Iterator[StageLayout]:
    """All layouts of up to 4 stages of 0 to 2 layers, those of 6 with 0 or 1, and some larger."""
    for num_ranks, num_chunks in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        num_stages = num_ranks * num_chunks
        if num_ranks == 1 and num_chunks > 1:
            continue
        choices = (0, 1, 2) if num_stages <= 4 else (0, 1) if num_stages <= 6 else ()
        stages = set(itertools.product(choices, repeat=num_stages))
        if num_stages > 4:
            generator = random.Random(num_stages)
            stages |= {tuple(generator.choices((0, 0, 1, 2, 3), k=num_stages)) for _ in range(60)}
        yield from (
            StageLayout(num_ranks, num_chunks, layers) for layers in sorted(stages) if sum(layers)
        )


SMALL_LAYOUTS = tuple(small_layouts())


class Walk:
    """One micro-batch walked through a plan with sets for tensors, trusting nothing but the plan.

    The walk keeps its own depth state like the published pseudo-code does: a list of pushed
    sources and a running partial.
    """

    def __init__(self, plan: TransferPlan) -> None:
        assert plan.depth is not None
        self.plan, self.depth, self.layout = plan, plan.depth, plan.layout
        self.cache: list[dict[int, Value]] = [{} for _ in range(self.layout.num_ranks)]
        self.seen: list[set[Value]] = [set() for _ in range(self.layout.num_ranks)]
        self.fetched: Counter[tuple[int, int]] = Counter()
        self.cache_rows = [0] * self.layout.num_ranks
        self.messages: list[list[Value]] = []
        self.reference = self.unpipelined()
        self.complete = {*self.reference[-1][0], self.reference[-1][1]}
        self.run()

    def unpipelined(self) -> list[tuple[list[Value], Value]]:
        """(sources, partial) before each sublayer and at the end, without a pipeline."""
        sources: list[Value] = []
        partial: Value = frozenset(["embedding"])
        states = []
        for i in range(self.depth.num_sublayers):
            states.append((list(sources), partial))
            if i % self.depth.block_sublayers == 0:
                sources, partial = [*sources, partial], frozenset()
            partial = partial | {i}
        return [*states, (sources, partial)]

    def run(self) -> None:
        message: list[Value] = []
        sublayer = 0
        for g in range(self.layout.num_stages):
            end = sublayer + self.layout.layers[g] * self.depth.sublayers_per_layer
            state, partial = self.enter(g, message, sublayer)
            if end > sublayer:
                wanted, running = self.reference[sublayer]
                assert ([state[n] for n in sorted(state)], partial) == (wanted, running), g
                state = dict(enumerate(self.reference[end][0]))
                partial = self.reference[end][1]
            message = self.leave(g, state, partial, end)
            sublayer = end

    def enter(self, g: int, message: list[Value], sublayer: int) -> tuple[dict[int, Value], Value]:
        """The sources and the partial that stage g can see: what arrived, and what it fetches."""
        if g == 0:
            return {}, frozenset(["embedding"])
        rank, boundary = self.layout.rank(g), self.plan.boundaries[g - 1]
        assert (boundary.stage, boundary.sublayer) == (g, sublayer)
        assert (boundary.sender_rank, boundary.receiver_rank) == (self.layout.rank(g - 1), rank)
        assert len(message) == boundary.rows == self.plan.rows_in(g) == self.plan.rows_out(g - 1)
        *arrived, last = message
        state = dict(zip(boundary.sent, arrived, strict=True))
        if self.plan.transport == "delta":
            assert not self.seen[rank] & set(arrived), (self.plan, g)
        self.seen[rank] |= set(arrived)

        cache = self.cache[rank]
        assert self.plan.fetches(g) == boundary.held
        for source in boundary.held:
            state[source] = cache[source]
            self.fetched[rank, source] += 1
        for source in self.plan.last_fetch(g):
            del cache[source]
        if boundary.partial_complete:
            # Every message has this row; a rank meets it twice only where empty stages hand it on.
            assert last not in self.seen[rank] or not self.layout.layers[g - 1], (self.plan, g)
            self.seen[rank].add(last)
        for source in self.plan.stash_on_entry(g):
            self.stash(rank, source, last if source == boundary.partial else state[source])
        return state, last

    def leave(self, g: int, state: dict[int, Value], partial: Value, end: int) -> list[Value]:
        """The message into stage g + 1, packed from what stage g can see."""
        rank = self.layout.rank(g)
        if self.layout.layers[g]:
            self.seen[rank] |= set(state.values())
        if partial in self.complete:
            self.seen[rank].add(partial)
        complete = {**state, len(self.reference[end][0]): partial}
        for source in self.plan.stash_on_exit(g):
            self.stash(rank, source, complete[source])
        self.cache_rows[rank] = max(self.cache_rows[rank], len(self.cache[rank]))
        if g == self.layout.num_stages - 1:
            return []
        boundary = self.plan.boundaries[g]
        hidden = end == self.depth.num_sublayers
        assert boundary.partial == (None if hidden else len(self.reference[end][0]))
        assert boundary.partial_complete == (not hidden and partial in self.complete)
        if not self.layout.layers[g]:
            passed_on = set(boundary.sent)
            assert passed_on == set(state) or self.plan.transport == "full", (self.plan, g)
        message = [*(state[source] for source in boundary.sent), partial]
        self.messages.append(message)
        return message

    def stash(self, rank: int, source: int, value: Value) -> None:
        assert source not in self.cache[rank], (self.plan, rank, source)
        assert value in self.complete, (self.plan, rank, source)
        self.cache[rank][source] = value


def plans(transport: str) -> Iterator[TransferPlan]:
    for layout, block_sublayers in itertools.product(SMALL_LAYOUTS, range(1, 8)):
        depth = DepthMap(layout.num_layers, block_sublayers)
        yield TransferPlan.for_sources(layout, depth, transport)


def test_delta_brings_every_stage_what_it_reads_and_no_source_to_a_rank_twice() -> None:
    for plan in plans("delta"):
        walk = Walk(plan)
        assert not any(walk.cache), plan
        assert tuple(walk.cache_rows) == plan.cache_rows_per_rank, plan
        assert plan.cache_rows == max(walk.cache_rows)
        assert {
            (life.rank, life.source): plan.expected_deposits(life.owner, life.source)
            for life in plan.lives
        } == walk.fetched, plan


def test_full_carries_the_whole_prefix_on_every_hop_and_keeps_nothing() -> None:
    for plan in plans("full"):
        walk = Walk(plan)
        assert plan.cache_rows == 0 and not plan.lives
        for boundary, message in zip(plan.boundaries, walk.messages, strict=True):
            sources, partial = walk.reference[boundary.sublayer]
            between = 0 < boundary.sublayer < walk.depth.num_sublayers
            assert message == ([*sources, partial] if between else [partial]), plan


def test_one_chunk_per_rank_saves_nothing_and_the_grid_says_so() -> None:
    for plan in plans("delta"):
        if plan.layout.num_chunks == 1:
            assert (plan.rows_full, plan.max_rows_full) == (plan.rows_delta, plan.max_rows_delta)
    depth = DepthMap.from_layers(12, 2)
    one, three = (
        TransferPlan.for_sources(StageLayout.even(12, 2, chunks), depth) for chunks in (1, 3)
    )
    assert one.grid().endswith(
        "\nV=1: no rank meets a source twice, so delta saves nothing over full."
    )
    assert "saves nothing" not in three.grid()


def test_delta_is_never_wider_than_full_on_any_hop() -> None:
    for plan in plans("delta"):
        for delta, full in zip(
            plan.boundaries, plan.with_transport("full").boundaries, strict=True
        ):
            assert delta.rows <= full.rows, plan
            assert set(delta.held).isdisjoint(delta.sent), plan
            assert set(delta.held) | set(delta.sent) <= set(full.sent), plan


@pytest.mark.parametrize(("num_layers", "block_layers", "layout", "rows", "widest"), FIGURES)
def test_known_layouts_move_the_known_number_of_rows(
    num_layers: int,
    block_layers: int,
    layout: StageLayout,
    rows: tuple[int, int],
    widest: tuple[int, int],
) -> None:
    depth = DepthMap.from_layers(num_layers, block_layers)
    for transport in ("full", "delta"):
        plan = TransferPlan.for_sources(layout, depth, transport)
        assert (plan.rows_full, plan.rows_delta) == rows
        assert (plan.max_rows_full, plan.max_rows_delta) == widest
        chosen = (rows[transport == "delta"], widest[transport == "delta"])
        assert (plan.rows, plan.max_rows) == chosen
    Walk(plan)


def test_the_grid_of_eight_layers_on_two_ranks_of_two_chunks() -> None:
    plan = TransferPlan.for_sources(StageLayout.even(8, 2, 2), DepthMap.from_layers(8, 2))
    assert plan.grid() == str(plan) == EIGHT_LAYERS


def test_the_grid_with_stand_alone_embedding_and_loss_and_an_empty_stage_between() -> None:
    layout = StageLayout.parse("E|tt|t||tt|L", 2)
    assert TransferPlan.for_sources(layout, DepthMap(5, 3)).grid(1536) == STAND_ALONE_ENDS


def test_the_grid_of_four_streams_and_their_single_rows_at_the_ends() -> None:
    plan = TransferPlan.for_streams(StageLayout.parse("E|tt|tt|L", 2), 4)
    assert plan.grid() == FOUR_STREAMS
    assert (plan.rows_full, plan.rows_delta, plan.max_rows, plan.cache_rows) == (6, 6, 4, 0)


def test_streams_cross_at_their_number_between_layers_and_as_one_row_outside() -> None:
    for layout, num_streams in itertools.product(SMALL_LAYOUTS, (1, 3, 4)):
        plan = TransferPlan.for_streams(layout, num_streams)
        for boundary in plan.boundaries:
            before = sum(layout.layers[: boundary.stage])
            assert boundary.rows == (num_streams if 0 < before < layout.num_layers else 1)
            assert (boundary.held, boundary.sent, boundary.partial) == ((), (), None)
        assert plan.with_transport("delta") == plan


def test_a_rank_keeps_what_it_finished_itself_as_well_as_what_it_received() -> None:
    plan = TransferPlan.for_sources(StageLayout.even(8, 2, 2), DepthMap.from_layers(8, 2))
    assert [plan.stash_on_entry(g) for g in range(4)] == [(), (0, 1), (), ()]
    assert [plan.stash_on_exit(g) for g in range(4)] == [(0, 1), (2,), (), ()]
    assert [plan.last_fetch(g) for g in range(4)] == [(), (), (0, 1), (0, 1, 2)]
    assert plan.stashes(1) == (0, 1, 2)
    assert plan.expected_deposits(1, 2) == 1
    assert [(life.owner, life.by_wire) for life in plan.lives if life.rank == 1] == [
        (1, True),
        (1, True),
        (1, False),
    ]
    with pytest.raises(ValueError, match="stage 0 stashes s0 s1, not s2"):
        plan.expected_deposits(0, 2)


def test_plans_survive_json_and_edited_json_is_refused() -> None:
    layout = StageLayout.parse("E|tt|t||tt|L", 2)
    for plan in (
        TransferPlan.for_sources(layout, DepthMap(5, 3)),
        TransferPlan.for_sources(layout, DepthMap(5, 3), "full"),
        TransferPlan.for_streams(layout, 4),
    ):
        assert TransferPlan.from_json(plan.to_json()) == plan
        fields = json.loads(plan.to_json())
        assert fields["rows_full"] == plan.rows_full and fields["digest"] == plan.digest()
        fields["boundaries"][2]["rows"] += 1
        with pytest.raises(ValueError, match="was edited, or written by another version"):
            TransferPlan.from_json(json.dumps(fields))
    for text in ("[]", "{}", '{"layout": 3, "depth": null}', "nothing"):
        with pytest.raises(ValueError):
            TransferPlan.from_json(text)


def test_equal_plans_have_equal_digests_and_any_difference_changes_them() -> None:
    def digest(layers: tuple[int, ...], block_sublayers: int, transport: str = "delta") -> str:
        layout = StageLayout(2, 2, layers)
        depth = DepthMap(layout.num_layers, block_sublayers)
        return TransferPlan.for_sources(layout, depth, transport).digest()

    digests = [
        digest((2, 2, 2, 2), 4),
        digest((2, 2, 2, 2), 5),
        digest((2, 3, 1, 2), 4),
        digest((2, 2, 2, 2), 4, "full"),
        TransferPlan.for_streams(StageLayout(2, 2, (2, 2, 2, 2)), 4).digest(),
        TransferPlan.for_streams(StageLayout(2, 2, (2, 2, 2, 2)), 3).digest(),
        # Same boundaries, other layers behind the last one.
        digest((2, 2, 2, 3), 4),
    ]
    assert len(set(digests)) == len(digests)
    assert digest((2, 2, 2, 2), 4) == digests[0]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in digests)


def test_plans_are_frozen_values() -> None:
    plan = TransferPlan.for_streams(StageLayout.even(4, 2), 2)
    assert len({plan, TransferPlan.for_streams(StageLayout.even(4, 2), 2)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.transport = "delta"  # type: ignore[misc]


def test_plans_that_cannot_be_are_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match="2 faults") as caught:
        TransferPlan.for_sources(StageLayout.even(8, 2), DepthMap(6, 2), "some")
    assert "transport is 'some'; allowed: full, delta" in str(caught.value)
    assert "the layout has 8 layers and the depth 6" in str(caught.value)
    with pytest.raises(ValueError, match="num_streams is 0"):
        TransferPlan.for_streams(StageLayout.even(8, 2), 0)
    plan = TransferPlan.for_streams(StageLayout.even(8, 2), 1)
    for question in (plan.rows_in, plan.rows_out, plan.fetches, plan.boundary_into):
        with pytest.raises(ValueError, match="stages 0 to 1"):
            question(2)
