# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a mechanism with sources begin."""

from __future__ import annotations

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap


@pytest.mark.parametrize("mechanism", ["residual", "hc", "mhc"])
def test_mechanisms_without_sources_have_no_depth_map(mechanism: str) -> None:
    assert ResidualConfig(mechanism).depth_map(4) is None


def test_full_attnres_has_one_block_per_sublayer() -> None:
    assert ResidualConfig("attnres").depth_map(6) == DepthMap(6, 1)
    assert ResidualConfig("attnres").depth_map(6, 3) == DepthMap(6, 1, 3)


@pytest.mark.parametrize("per_layer", [1, 2, 3])
def test_block_lengths_count_layers_or_sublayers_as_their_names_say(per_layer: int) -> None:
    by_layers = ResidualConfig("block_attnres", block_layers=3)
    by_sublayers = ResidualConfig("block_attnres", block_sublayers=3)
    assert by_layers.depth_map(10, per_layer) == DepthMap(10, 3 * per_layer, per_layer)
    assert by_sublayers.depth_map(10, per_layer) == DepthMap(10, 3, per_layer)


@pytest.mark.parametrize("per_layer", [1, 2])
@pytest.mark.parametrize("num_layers", [*range(1, 40), 61, 93, 1000])
def test_the_block_length_left_out_gives_the_shortest_whole_layers_for_at_most_eight_blocks(
    num_layers: int, per_layer: int
) -> None:
    depth = ResidualConfig("block_attnres").depth_map(num_layers, per_layer)
    assert depth is not None
    assert depth.num_blocks <= 8
    assert depth.block_sublayers % per_layer == 0
    shorter = depth.block_sublayers - per_layer
    assert shorter == 0 or DepthMap(num_layers, shorter, per_layer).num_blocks > 8


def test_kimi_k3_gets_its_own_block_length_when_none_is_given() -> None:
    """93 layers in eight blocks of twelve, the last one short."""
    assert ResidualConfig("block_attnres").depth_map(93) == DepthMap.from_layers(93, 12)
