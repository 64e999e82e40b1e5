# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The transport benchmark runs, its counts are the plan's, and it notices when they are not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from benchmarks import transport
from megatron_residuals.mcore.stage_io import StageIO

TINY = "--layers 4 --hidden-size 32 --seq-length 8 --micro-batch-size 1 --microbatches 2"
TINY += " --block-layers 1 --rounds 1 --timeout-s 60"
# Rows that one micro-batch moves forward, hop by hop, for one and two chunks on two ranks.
PLANNED_ROWS = {
    1: {"plain": 1, "full": 3, "delta": 3},
    2: {"plain": 1 + 1 + 1, "full": 2 + 3 + 4, "delta": 2 + 1 + 1},
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[str]]]:
    """Exit status, and the printed table by the name of its rows."""
    status = transport.main([*TINY.split(), *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return status, {name: cells for name, *cells in rows}


@pytest.mark.parametrize("vpp", [1, 2])
def test_the_table_has_a_column_per_model_and_counts_what_the_plan_says(
    vpp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, table = run(capsys, "--vpp", str(vpp))
    assert status == 0
    assert table.pop("per step") == ["plain", "full", "delta"]
    assert all(len(cells) == 3 for cells in table.values())

    micro_batches, row_mib = 2, 8 * 1 * 32 * 4 / 2**20
    rows = [micro_batches * count for count in PLANNED_ROWS[vpp].values()]
    assert table["rows sent forward"] == [str(count) for count in rows]
    assert table["rows copied to send them"] == ["0", *map(str, rows[1:])]
    assert table["gradient rows sent backward"] == [str(count) for count in rows]
    assert table["rows copied on receive"] == ["0", "0", "0"]
    assert table["MiB on the wire"] == [f"{2 * count * row_mib:.3f}" for count in rows]
    assert table["MiB planned"] == table["MiB on the wire"]
    assert table["most sends of one row by a rank"] == ["1", str(vpp), "1"]


def test_every_time_is_a_ratio_or_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    _, table = run(capsys, "--vpp", "2", "--rounds", "4")
    number = r"\d+\.\d+"
    for name in ("time / plain", "time / full", "CPU time / plain", "CPU time / full"):
        for cell in table[name]:
            assert re.fullmatch(rf"{number} \({number} to {number}\)", cell)
    assert table["time / plain"][0].startswith("1.000 ")
    shares = [name for name in table if "CPU time" in name and "/" not in name or "of it" in name]
    assert len(shares) == 6
    assert all(cell.endswith(" %") for name in shares for cell in table[name])


def test_a_copy_on_receive_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter = StageIO.enter

    def copying(io: StageIO, payload: torch.Tensor, visit: Any) -> Any:
        return enter(io, payload.clone(), visit)

    monkeypatch.setattr(StageIO, "enter", copying)
    status = transport.main([*TINY.split(), "--vpp", "2"])
    assert status == 1
    assert "delta: rows_copied_on_receive is" in capsys.readouterr().err
