# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transfer plans as text: literal grids, JSON, digests, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.layout import GPT_LAYER
from megatron_residuals.pipeline.plan import StageLayout, TransferPlan

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


def test_plans_survive_json_and_edited_json_is_refused() -> None:
    layout = StageLayout.parse("E|tt|t||tt|L", 2)
    hybrid = StageLayout(2, 2, (1, 0, 1, 1), (("mamba",), GPT_LAYER, ("mamba",)))
    for plan in (
        TransferPlan.for_sources(layout, DepthMap(5, 3)),
        TransferPlan.for_sources(layout, DepthMap(5, 3), "full"),
        TransferPlan.for_streams(layout, 4),
        TransferPlan.for_sources(hybrid, DepthMap(4, 3, 1)),
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
    assert "the layout has 16 sublayers and the depth 12" in str(caught.value)
    with pytest.raises(ValueError, match="num_streams is 0"):
        TransferPlan.for_streams(StageLayout.even(8, 2), 0)
    plan = TransferPlan.for_streams(StageLayout.even(8, 2), 1)
    for question in (plan.rows_in, plan.rows_out, plan.fetches, plan.boundary_into):
        with pytest.raises(ValueError, match="stages 0 to 1"):
            question(2)
