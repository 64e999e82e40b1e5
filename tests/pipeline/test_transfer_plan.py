# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transfer plans: figures, and small pipelines walked stage by stage."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import GPT_LAYER
from megatron_residuals.pipeline.plan import StageLayout, TransferPlan

HYBRID = StageLayout(
    2, 2, (2, 0, 1, 3), (("mamba",), GPT_LAYER, ("moe",), GPT_LAYER, ("mamba",), ("mamba",))
)
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
            end = self.layout.sublayers(g).stop
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
    for block_sublayers in range(1, 8):
        depth = DepthMap(HYBRID.num_sublayers, block_sublayers, 1)
        yield TransferPlan.for_sources(HYBRID, depth, transport)


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


def test_streams_cross_at_their_number_between_layers_and_as_one_row_outside() -> None:
    for layout, num_streams in itertools.product(SMALL_LAYOUTS, (1, 3, 4)):
        plan = TransferPlan.for_streams(layout, num_streams)
        for boundary in plan.boundaries:
            before = sum(layout.layers[: boundary.stage])
            assert boundary.rows == (num_streams if 0 < before < layout.num_layers else 1)
            assert (boundary.held, boundary.sent, boundary.partial) == ((), (), None)
        assert plan.with_transport("delta") == plan


def test_a_state_opens_once_closes_once_and_crosses_every_hop_between() -> None:
    for layout in SMALL_LAYOUTS:
        with_layers = [g for g, layers in enumerate(layout.layers) if layers]
        for residual, opens in (
            ("attnres", 0),
            ("block_attnres(block_sublayers=3)", 0),
            # n streams are not sent for one embedding
            ("mhc", with_layers[0]),
            ("residual", with_layers[0]),
        ):
            plan = TransferPlan.for_residual(ResidualConfig.parse(residual), layout)
            stages = range(layout.num_stages)
            closes = with_layers[-1]
            assert [g for g in stages if plan.opens(g)] == [opens], plan
            assert [g for g in stages if plan.closes(g)] == [closes], plan
            assert [plan.receives(g) for g in stages] == [opens < g <= closes for g in stages]
            assert [plan.sends(g) for g in stages] == [opens <= g < closes for g in stages]


def test_the_plan_of_a_residual_is_that_of_its_state() -> None:
    layout = StageLayout.even(8, 2, 2)
    for residual, expected in (
        ("residual", TransferPlan.for_streams(layout, 1)),
        ("hc(streams=3)", TransferPlan.for_streams(layout, 3)),
        ("attnres", TransferPlan.for_sources(layout, DepthMap(8, 1))),
        (
            "block_attnres(block_layers=2, transport='full')",
            TransferPlan.for_sources(layout, DepthMap(8, 4), "full"),
        ),
    ):
        assert TransferPlan.for_residual(ResidualConfig.parse(residual), layout) == expected
    single = StageLayout(2, 1, (3, 4), (("mamba",),) * 7)
    blocks = TransferPlan.for_residual(ResidualConfig("block_attnres", block_layers=2), single)
    assert blocks == TransferPlan.for_sources(single, DepthMap(7, 2, 1))
    with pytest.raises(ValueError, match="layers of this layout have 1 to 2 sublayers"):
        TransferPlan.for_residual(ResidualConfig("block_attnres", block_layers=2), HYBRID)


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
