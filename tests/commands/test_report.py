# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals report`: the page of every mechanism, from a file alone."""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from megatron_residuals.cli import main
from megatron_residuals.commands.report import EXAMPLES
from megatron_residuals.config import MECHANISMS, ResidualConfig
from megatron_residuals.diagnostics import journal, page, panels
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.records import Record
from megatron_residuals.pipeline.plan import StageLayout, TransferPlan

LAYERS, STAGES = 3, 2


def made_up(mechanism: str, iteration: int) -> Record:
    """A record with every metric of a mechanism; values grow with depth and time."""
    lengths = {"sublayer": 2 * LAYERS, "reader": 2 * LAYERS + 1, "hop": STAGES - 1, "run": 1}
    lengths |= {"rank": STAGES, "stage": STAGES}
    series: dict[str, list[float]] = {}
    matrices: dict[str, list[list[float]]] = {}
    for name, metric in metrics_of(mechanism).items():
        values = [0.5 + 0.1 * i + 0.01 * iteration for i in range(lengths[metric.axis])]
        if metric.columns is None:
            series[name] = values
        else:
            matrices[name] = [[value, math.nan] for value in values]
    losses = {i: {"lm loss": 5.0 - 0.1 * i} for i in range(max(1, iteration - 9), iteration + 1)}
    return Record(iteration, series, matrices, losses)


def write_run(folder: Path, mechanism: str, iterations: tuple[int, ...] = (10, 20, 30)) -> Path:
    writer = journal.JournalWriter(folder)
    plan = TransferPlan.for_streams(StageLayout((STAGES), 1, (1, 2)), 1)
    writer.write(
        "start",
        {
            "config": f"{mechanism}(log_interval=10)",
            "settings": dataclasses.asdict(ResidualConfig(mechanism, log_interval=10)),
            "num_layers": LAYERS,
            "pipeline": {"ranks": STAGES, "chunks": 1},
            "plan": plan.grid(),
            "recompute": "none",
            "host_recompute": "none",
            "version": "0",
            "megatron_core": "0",
        },
    )
    for iteration in iterations:
        writer.write("step", dataclasses.asdict(made_up(mechanism, iteration)))
    return folder


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m != "block_attnres"])
def test_the_page_is_one_picture_and_one_file_that_holds_it(
    mechanism: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, plain = write_run(tmp_path / "own", mechanism), write_run(tmp_path / "plain", "residual")
    status, out, err = run(capsys, f"report {own} --baseline {plain} --output {tmp_path / 'out'}")
    assert (status, err) == (0, "")
    picture = (tmp_path / "out" / "residual_report.png").read_bytes()
    text = (tmp_path / "out" / "residual_report.html").read_text()
    assert picture.startswith(b"\x89PNG")
    assert base64.b64encode(picture).decode() in text
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing from anywhere else
    for name in metrics_of(mechanism):
        if name in journal.read(own).metric_names():
            assert f"<code>{name}</code>" in text
    assert str(tmp_path / "out" / "residual_report.png") in out


def test_what_lies_outside_its_range_is_printed_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_run(tmp_path, "mhc")
    status, out, _ = run(capsys, f"report {own}")
    assert status == 0
    # 0.5 + 0.1 * 5 + 0.01 * 30 at the last sublayer and record
    assert "look: mhc/gain_forward is 1.3, healthy is 0.9 to 1.1" in out
    assert "look: mhc/composite_forward" not in out
    text = (tmp_path / "residual_report.html").read_text()
    assert '<tr class="look"><td><code>mhc/gain_forward</code>' in text
    assert '<tr class="ok"><td><code>mhc/composite_forward</code>' in text


@pytest.mark.parametrize("iterations", [(10,), (10, 20)])
def test_a_run_that_has_just_begun_has_a_page_too(
    iterations: tuple[int, ...], tmp_path: Path
) -> None:
    own = journal.read(write_run(tmp_path, "mhc", iterations))
    for path in page.write(own, None, tmp_path):
        assert path.stat().st_size > 1000


def test_a_run_without_a_record_and_a_folder_without_a_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write_run(tmp_path / "empty", "mhc", ())
    for command, message in (
        (f"report {empty}", "has no recorded step yet"),
        (f"report {tmp_path / 'none'}", "--residual-log-interval"),
    ):
        status, out, err = run(capsys, command)
        assert (status, out) == (2, "") and message in err


def test_panels_are_laid_out_without_overlap() -> None:
    def nothing(axes: Any) -> None:
        return None

    chosen = [page.Panel(nothing, rows) for rows in (1, 1, 1, 2, 1, 2, 1)]
    places, num_rows = page._arrange(chosen)
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1)]
    assert num_rows == 3


def test_smoothing_gives_one_mean_for_each_full_window() -> None:
    assert panels.smooth([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [3.0, 4.0]
    assert panels.smooth([2.0, 4.0]) == [3.0]
    assert panels.smooth([]) == []


def test_the_label_of_a_run_leaves_logging_out(tmp_path: Path) -> None:
    assert panels.label_of(journal.read(write_run(tmp_path / "a", "mhc"))) == "mhc"
    assert panels.label_of(journal.read(write_run(tmp_path / "b", "residual"))) == "plain residual"


def test_the_examples_of_the_help_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line.split(" ", 3)[3] for line in EXAMPLES.splitlines() if "report" in line]
    assert len(commands) == 2
    for command in commands:
        status, _, err = run(capsys, command)
        assert status == 2 and "--residual-log-interval" in err  # there is no such run here
