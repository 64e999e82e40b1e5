# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Depth arithmetic against a walk that pushes and sums like the published pseudo-code."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_residuals.depth import DepthMap, source_names

SMALL_DEPTHS = [
    DepthMap(num_layers, block_sublayers, per_layer)
    for num_layers in range(1, 7)
    for block_sublayers in range(1, 15)
    for per_layer in (1, 2, 3)
]

EXPECTED_TABLE = """\
sublayer  opens  reads
       0  s1     s0
     1-2         s0 s1~
       3  s2     s0 s1
     4-5         s0-s2~
       6  s3     s0-s2
       7         s0-s3~
   final         s0-s3"""


def walk(depth: DepthMap) -> list[tuple[list[set[object]], set[object]]]:
    """(pushed sources, partial) before each sublayer and before the end, as contributions."""
    blocks: list[set[object]] = []
    partial: set[object] = {"embedding"}
    states = []
    for i in range(depth.num_sublayers):
        states.append((list(blocks), set(partial)))
        if i % depth.block_sublayers == 0:
            blocks.append(partial)
            partial = set()
        partial = partial | {i}
    return [*states, (list(blocks), set(partial))]


def contributions(depth: DepthMap, source: int) -> set[object]:
    return {"embedding"} if source == 0 else set(depth.block_range(source))


def test_every_count_agrees_with_a_walk_through_the_sublayers() -> None:
    for depth in SMALL_DEPTHS:
        states = walk(depth)
        for i, (blocks, partial) in enumerate(states):
            assert blocks == [contributions(depth, n) for n in range(depth.num_sources(i))], depth
            target = contributions(depth, depth.partial_id(i))
            assert partial <= target, (depth, i)
            assert depth.partial_is_complete(i) == (partial == target), (depth, i)
            assert depth.num_read(i) == len(blocks) + 1, (depth, i)
            assert depth.num_complete(i) == len(blocks) + (partial == target), (depth, i)
            if i < depth.num_sublayers:
                pushes = len(states[i + 1][0]) > len(blocks)
                assert depth.opens_block(i) == pushes, (depth, i)


def test_the_blocks_cut_all_sublayers_into_consecutive_ranges() -> None:
    for depth in SMALL_DEPTHS:
        ranges = [depth.block_range(source) for source in range(depth.num_blocks + 1)]
        assert [i for block in ranges for i in block] == list(range(depth.num_sublayers)), depth
        assert not ranges[0]
        assert all(len(block) == depth.block_sublayers for block in ranges[1:-1]), depth
        assert 1 <= len(ranges[-1]) <= depth.block_sublayers, depth


@pytest.mark.parametrize(
    ("num_layers", "block_layers"), [(27, 3), (93, 12), (5, 5), (7, 9), (6, 1)]
)
def test_blocks_of_whole_layers_follow_the_published_source_counts(
    num_layers: int, block_layers: int
) -> None:
    depth = DepthMap.from_layers(num_layers, block_layers)
    for layer in range(num_layers):
        attention = 1 if layer == 0 else (layer - 1) // block_layers + 2
        assert depth.num_read(2 * layer) == attention
        assert depth.num_read(2 * layer + 1) == layer // block_layers + 2
    assert depth.num_read(depth.num_sublayers) == (num_layers - 1) // block_layers + 2


def test_two_released_models_end_with_the_sources_they_are_known_for() -> None:
    kimi_linear, kimi_k3 = DepthMap.from_layers(27, 3), DepthMap.from_layers(93, 12)
    assert kimi_linear.num_read(54) == 10
    assert kimi_k3.num_read(186) == 9
    assert (kimi_k3.num_blocks, len(kimi_k3.block_range(8))) == (8, 18)


def test_the_printed_table_shows_what_each_sublayer_reads() -> None:
    assert str(DepthMap(num_layers=4, block_sublayers=3)) == EXPECTED_TABLE


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ((), "-"),
        ((4,), "s4"),
        ((0, 1), "s0 s1"),
        ((0, 1, 2), "s0-s2"),
        ((0, 2, 3, 5, 6, 7), "s0 s2 s3 s5-s7"),
    ],
)
def test_source_names_shorten_runs_of_three_or_more(sources: tuple[int, ...], names: str) -> None:
    assert source_names(sources) == names


def test_all_wrong_counts_are_reported_in_one_error() -> None:
    with pytest.raises(ValueError, match="3 faults") as caught:
        DepthMap(num_layers=0, block_sublayers=True, sublayers_per_layer=2.0)  # type: ignore[arg-type]
    for words in ("num_layers is 0", "block_sublayers is True", "sublayers_per_layer is 2.0"):
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="block_layers is -1; it must be an integer of at least 1"):
        DepthMap.from_layers(4, -1)


@pytest.mark.parametrize("sublayer", [-1, 9])
def test_points_outside_the_model_are_refused(sublayer: int) -> None:
    depth = DepthMap(4, 3)
    for question in (depth.num_sources, depth.partial_is_complete, depth.opens_block):
        with pytest.raises(ValueError, match=f"sublayer is {sublayer}; this depth allows 0 to"):
            question(sublayer)
    with pytest.raises(ValueError, match="sources 0 to 3"):
        depth.block_range(4)
    with pytest.raises(ValueError, match="allows 0 to 7"):
        depth.opens_block(8)


def test_a_depth_map_is_a_frozen_value() -> None:
    assert DepthMap.from_layers(6, 2) == DepthMap(6, 4)
    assert len({DepthMap(6, 4), DepthMap.from_layers(6, 2), DepthMap(6, 3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        DepthMap(6, 4).num_sublayers = 7  # type: ignore[misc]
