# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The accounting of planes: what is chosen by it, and what the documents say of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.traffic import (
    PLAIN,
    SUM_OF_SOURCE,
    Planes,
    one_pass,
    streams,
    two_phases,
)
from megatron_residuals.pipeline.two_phase import reads_in_two_phases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def test_auto_reads_every_block_in_the_way_that_moves_fewer_planes() -> None:
    # The rule, the simulator and the documents counted in three ways, which disagreed.
    for length, num_layers in itertools.product(range(2, 26), (4, 13)):
        depth = DepthMap(num_layers, length)
        for source in range(1, depth.num_blocks + 1):
            block = depth.block_range(source)
            one, two = (way(source, len(block)).total for way in (one_pass, two_phases))
            chosen = {reads_in_two_phases("auto", depth, i) for i in block}
            assert chosen == {len(block) > 1 and two < one}, (length, num_layers, source)


def test_cutting_a_block_moves_more_and_changes_no_choice() -> None:
    for m, readers in itertools.product((1, 2, 5), (3, 4, 8)):
        for way, cut in itertools.product((one_pass, two_phases), range(1, readers)):
            parts = way(m, cut).plus(way(m, readers - cut, opens=False))
            assert parts.total >= way(m, readers).total


def per_sublayer(way: Callable[[int, int], Planes]) -> Callable[[int, int, int], Planes]:
    """Of a block of S sublayers that attend to N, the sum of one source included."""

    def planes(n: int, num_read: int, length: int) -> Planes:
        moved = way(num_read - 1, length).plus(SUM_OF_SOURCE)
        return Planes(moved.forward / length, moved.backward / length)

    return planes


ROWS: dict[str, Callable[[int, int, int], Planes]] = {
    "plain residual": lambda n, num_read, length: PLAIN,
    "**mHC, Triton kernels here**": lambda n, num_read, length: streams(n, 2).plus(
        streams(n, 1), times=-1
    ),
    "**AttnRes, each read by itself, Triton kernels here**": per_sublayer(one_pass),
    "**Block AttnRes in two phases, Triton kernels here**": per_sublayer(two_phases),
}


def value(formula: str, n: int, num_read: int, length: int) -> float:
    """A formula of the page, as "6 + (2N − 6) / S", for numbers."""
    text = re.sub(r"(\d)\s*([nN(])", r"\1 * \2", formula.replace("−", "-"))
    return float(eval(text, {"__builtins__": {}}, {"n": n, "N": num_read, "S": length}))


@pytest.mark.parametrize("what", ROWS)
def test_the_page_on_performance_shows_what_the_accounting_says(what: str) -> None:
    (line,) = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| {what} |")]
    forward, backward = (cell.strip() for cell in line.strip("| ").split("|")[1:])
    for numbers in itertools.product((1, 2, 4), (2, 3, 8), (2, 3, 8)):
        planes = ROWS[what](*numbers)
        assert value(forward, *numbers) == pytest.approx(planes.forward, rel=1e-12)
        assert value(backward, *numbers) == pytest.approx(planes.backward, rel=1e-12)
