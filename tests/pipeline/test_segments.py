# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How a stage is cut for recomputation: every small case, and the figures of the formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import GPT_LAYER, StageLayout
from megatron_residuals.pipeline.segments import (
    HostFull,
    Segment,
    block_segments,
    group_length,
    layer_ranges,
    stage_group_length,
    stage_segments,
)

LAYERS = 6


LAYOUT = StageLayout(1, 1, (LAYERS,))


def stages() -> Iterator[tuple[DepthMap, range]]:
    """Every block length and every contiguous run of layers of a small model."""
    for block_sublayers in range(1, 2 * LAYERS + 2):
        depth = DepthMap(LAYERS, block_sublayers)
        for start, stop in itertools.combinations_with_replacement(range(LAYERS + 1), 2):
            yield depth, range(2 * start, 2 * stop)


def joined(parts: tuple[range, ...]) -> list[int]:
    return [sublayer for part in parts for sublayer in part]


@pytest.mark.parametrize("by_layer", [False, True])
def test_block_segments_partition_the_stage_in_order(by_layer: bool) -> None:
    for depth, sublayers in stages():
        segments = block_segments(LAYOUT, depth, sublayers, by_layer=by_layer)
        assert joined(tuple(segment.sublayers for segment in segments)) == list(sublayers)
        assert all(segment.checkpoint and len(segment.sublayers) > 0 for segment in segments)


def test_a_stage_is_cut_exactly_where_blocks_open() -> None:
    for depth, sublayers in stages():
        starts = [
            s.sublayers.start for s in block_segments(LAYOUT, depth, sublayers, by_layer=False)
        ]
        assert set(starts[1:]) == {
            i for i in sublayers if depth.opens_block(i) and i != sublayers.start
        }
        # a block that a stage cuts is one segment in each of the two stages
        assert starts[:1] == list(sublayers[:1])


def test_a_segment_never_spans_two_blocks() -> None:
    for depth, sublayers in stages():
        for segment in block_segments(LAYOUT, depth, sublayers, by_layer=False):
            assert len({i // depth.block_sublayers for i in segment.sublayers}) == 1


def test_inner_checkpoints_are_the_layers_of_each_segment_or_none() -> None:
    for depth, sublayers in stages():
        for segment in block_segments(LAYOUT, depth, sublayers, by_layer=False):
            assert segment.inner == ()
        for segment in block_segments(LAYOUT, depth, sublayers, by_layer=True):
            layers = {i // 2 for i in segment.sublayers}
            if len(layers) == 1:
                # a checkpoint of the same sublayers inside would replay them twice for nothing
                assert segment.inner == ()
                continue
            assert joined(segment.inner) == list(segment.sublayers)
            assert all(len({i // 2 for i in part}) == 1 for part in segment.inner)
            assert len(segment.inner) == len(layers)


def test_a_printed_example() -> None:
    """Blocks of five sublayers; a stage of layers 1 to 4, which cuts blocks at both ends."""
    assert block_segments(LAYOUT, DepthMap(6, 5), range(2, 10), by_layer=True) == [
        Segment(range(2, 5), True, (range(2, 4), range(4, 5))),
        Segment(range(5, 10), True, (range(5, 6), range(6, 8), range(8, 10))),
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_layer_ranges_partition_at_every_nth_layer_boundary(size: int, every: int) -> None:
    layout = StageLayout(1, 1, (12 // size,), (("some",) * size,) * (12 // size))
    for start, stop in itertools.combinations_with_replacement(range(13), 2):
        parts = layer_ranges(layout, range(start, stop), every)
        assert joined(parts) == list(range(start, stop))
        assert all(len(part) > 0 for part in parts)
        first_layer = start // size
        assert all(
            part.start % size == 0 and (part.start // size - first_layer) % every == 0
            for part in parts[1:]
        )
        assert all(len(part) <= every * size for part in parts)
        assert len(parts) == (-(-(stop - first_layer * size) // (every * size)) if parts else 0)


# Sublayers of a stage, r, and what is kept then in streams per token (mHC with n = 4).
FIGURES = [(24, 4, 48), (36, 4, 60), (60, 6, 76), (86, 8, 92), (122, 9, 110)]


@pytest.mark.parametrize(("sublayers", "length", "kept"), FIGURES)
def test_group_lengths_are_those_of_the_formula_for_known_models(
    sublayers: int, length: int, kept: int
) -> None:
    assert group_length(4, sublayers) == length
    assert 4 * -(-sublayers // length) + 6 * length == kept


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_no_other_length_is_cheaper_and_the_smallest_wins(n: int) -> None:
    for sublayers in range(1, 150):
        chosen = group_length(n, sublayers)
        costs = {r: n * math.ceil(sublayers / r) + (n + 2) * r for r in range(1, sublayers + 1)}
        assert costs[chosen] == min(costs.values())
        assert chosen == min(r for r, cost in costs.items() if cost == costs[chosen])


def test_a_stage_without_sublayers_has_no_segment_and_any_length() -> None:
    assert block_segments(LAYOUT, DepthMap(4, 2), range(4, 4), by_layer=True) == []
    assert layer_ranges(LAYOUT, range(4, 4)) == ()
    assert group_length(4, 0) == 1


def test_layers_of_unequal_size_are_cut_where_they_begin() -> None:
    layout = StageLayout(1, 1, (4,), (("mamba",), GPT_LAYER, ("mamba",), GPT_LAYER))
    assert layer_ranges(layout, range(6)) == (range(1), range(1, 3), range(3, 4), range(4, 6))
    assert layer_ranges(layout, range(2, 6), every=2) == (range(2, 4), range(4, 6))


@pytest.mark.parametrize(
    ("residual", "host_full", "expected"),
    [
        ("mhc", None, [Segment(range(4, 10), False)]),
        ("block_attnres(recompute='mix')", None, [Segment(range(4, 10), False)]),
        (
            "block_attnres(block_sublayers=3, recompute='block')",
            None,
            [Segment(range(4, 6), True), Segment(range(6, 9), True), Segment(range(9, 10), True)],
        ),
        (
            "mhc",
            HostFull("uniform", 2),
            [Segment(range(4, 8), True), Segment(range(8, 10), True)],
        ),
        (
            "attnres",
            HostFull("block", 1),
            [Segment(range(4, 6), True), Segment(range(6, 8), False), Segment(range(8, 10), False)],
        ),
    ],
)
def test_a_stage_is_cut_by_the_policy_or_by_the_hosts_full_recompute(
    residual: str, host_full: HostFull | None, expected: list[Segment]
) -> None:
    config, layout = ResidualConfig.parse(residual), StageLayout(3, 1, (2, 3, 0))
    depth = config.depth_map(layout.num_layers)
    assert stage_segments(config, layout, depth, 1, host_full) == expected
    assert stage_segments(config, layout, depth, 2, host_full) == []


def test_groups_have_the_given_length_or_that_of_the_formula() -> None:
    assert stage_group_length(ResidualConfig("mhc", recompute="group:3"), 24) == 3
    assert stage_group_length(ResidualConfig("mhc", recompute="group"), 24) == group_length(4, 24)
    assert stage_group_length(ResidualConfig("mhc", recompute="mix"), 24) is None
