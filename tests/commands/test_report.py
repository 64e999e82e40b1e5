# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals report`: the page of every mechanism, from a file alone."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.figure import Figure

from megatron_residuals.cli import main
from megatron_residuals.commands.report import EXAMPLES
from megatron_residuals.config import MECHANISMS, ResidualConfig
from megatron_residuals.diagnostics import journal, page, panels
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.heatmap import draw_heatmap
from megatron_residuals.diagnostics.records import Record
from megatron_residuals.mechanisms import MHC
from megatron_residuals.pipeline.layout import gpt_places
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
            row = 4 if metric.columns == "stream pair" else 2
            matrices[name] = [[value, math.nan] * (row // 2) for value in values]
    losses = {i: {"lm loss": 5.0 - 0.1 * i} for i in range(max(1, iteration - 9), iteration + 1)}
    return Record(iteration, series, matrices, losses)


def write_run(
    folder: Path, mechanism: str, iterations: tuple[int, ...] = (10, 20, 30), **header: object
) -> Path:
    writer = journal.JournalWriter(folder)
    plan = TransferPlan.for_streams(StageLayout((STAGES), 1, (1, 2)), 1)
    writer.write(
        "start",
        {
            "config": f"{mechanism}(log_interval=10)",
            "settings": ResidualConfig(mechanism, log_interval=10).as_mapping(),
            "num_layers": LAYERS,
            "pipeline": {"ranks": STAGES, "chunks": 1},
            "plan": plan.grid(),
            "recompute": "none",
            "host_recompute": "none",
            "version": "0",
            "megatron_core": "0",
            **header,
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


def test_nothing_that_a_run_recorded_is_markup_or_a_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # recompute, host_recompute, version and megatron_core went into the page as they were, and
    # a formula in the configuration that matplotlib could not parse ended the report
    said = "<script>alert(1)</script>&$\\\\frac{$'\""
    names = ("config", "plan", "recompute", "host_recompute", "version", "megatron_core")
    pipeline = {"ranks": said, "chunks": said}
    hostile = {**dict.fromkeys(names, said), "pipeline": pipeline}
    own = write_run(tmp_path / "own", "residual", (10,), **hostile)
    other = write_run(tmp_path / "other", "residual", (10,), **hostile)
    assert run(capsys, f"report {own} --baseline {other}")[0] == 0
    text = (own / "residual_report.html").read_text()
    assert "<script" not in text and said not in text
    # in the title twice (label and pipeline) and in heading, then once in each place
    assert text.count(html.escape(said).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")) == 13


def test_powers_of_ten_are_written_out(tmp_path: Path) -> None:
    # where nothing is parsed as a formula, matplotlib's own labels of such axes may be none
    own = journal.read(write_run(tmp_path, "mhc", (10,)))
    with matplotlib.rc_context({"text.parse_math": False}):
        axes = axes_after(lambda axes: panels.draw_stream_distance(axes, own))
        axes.set_ylim(1e-7, 1)
        axes.figure.draw_without_rendering()
    shown = labels(axes.get_yticklabels())
    assert {"1e-06", "0.001", "1"} <= set(shown) and not any("$" in text for text in shown)


def test_what_a_run_did_not_record_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # of a run of another version, or one whose lines were damaged; it ended in a traceback
    for mechanism in ("mhc", "attnres"):
        folder = write_run(tmp_path / mechanism, mechanism, ())
        journal.JournalWriter(folder).write("step", dataclasses.asdict(Record(1)))
        own = journal.read(folder)
        assert len(page.panels_of(own, None)) == 2  # losses, and what is kept
        assert run(capsys, f"report {folder}")[0] == 0


def test_what_cannot_be_drawn_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_run(tmp_path, "residual", ())
    record = Record(1, {"residual/output_rms": [1.7e308, -1.7e308] * LAYERS})
    journal.JournalWriter(own).write("step", dataclasses.asdict(record))
    status, out, err = run(capsys, f"report {own}")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"{own / journal.FILE_NAME} cannot be drawn" in err


def test_lines_that_were_skipped_are_counted_and_an_output_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "draw", lambda *runs: b"a picture")
    own = write_run(tmp_path / "own", "residual", (10,))
    with (own / journal.FILE_NAME).open("ab") as file:
        file.write(b"\xff\n[]\n")
    status, out, _ = run(capsys, f"report {own} --output {tmp_path / 'out'}")
    assert status == 0 and f"skipped 2 line(s) of {own / journal.FILE_NAME}" in out
    (tmp_path / "file").touch()
    status, out, err = run(capsys, f"report {own} --output {tmp_path / 'file' / 'out'}")
    assert (status, out) == (2, "")
    assert err == f"megatron-residuals: error: {tmp_path / 'file' / 'out'}: Not a directory\n"


def test_panels_are_laid_out_without_overlap() -> None:
    def nothing(axes: Any) -> None:
        return None

    chosen = [page.Panel(nothing, rows) for rows in (1, 1, 1, 2, 1, 2, 1)]
    places, num_rows = page._arrange(chosen)
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1)]
    assert num_rows == 3


def axes_after(draw: Callable[[Any], None]) -> Any:
    axes = Figure().subplots()
    draw(axes)
    return axes


def labels(ticks: Any) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_gains_that_are_one_up_to_rounding_are_drawn_as_a_level_line(tmp_path: Path) -> None:
    writer = journal.JournalWriter(write_run(tmp_path, "mhc", ()))
    series = {"mhc/composite_forward": [1 - 1e-7, 1, 1, 1 + 1e-7, 1, 1]}
    writer.write("step", dataclasses.asdict(Record(1, series)))
    forward, *_ = MHC.panels(journal.read(tmp_path))
    low, high = axes_after(forward.draw).get_ylim()
    assert high - low > 0.1


def test_streams_that_are_nearly_equal_are_told_from_copies(tmp_path: Path) -> None:
    # as a cosine on a linear axis, both are a line at one
    writer = journal.JournalWriter(write_run(tmp_path, "mhc", ()))
    for iteration, cosine in ((1, 1.0), (2, 0.9999), (3, 0.99)):
        series = {"mhc/stream_cosine": [cosine] * 6}
        writer.write("step", dataclasses.asdict(Record(iteration, series)))
    axes = axes_after(lambda axes: panels.draw_stream_distance(axes, journal.read(tmp_path)))
    distances, limit = (line.get_ydata() for line in axes.lines)
    assert list(distances) == pytest.approx([panels.SMALLEST_DISTANCE, 1e-4, 1e-2])
    assert limit[0] == pytest.approx(1e-3) and axes.get_yscale() == "log"


def test_mixing_matrices_are_drawn_as_matrices_from_the_first_sublayer_to_the_last() -> None:
    rows = [[i + 0.1, i + 0.2, i + 0.3, i + 0.4] for i in range(40)]
    metric = metrics_of("mhc")["mhc/mixing"]
    axes = axes_after(lambda axes: draw_heatmap(axes, rows, metric, gpt_places(20)))
    cells = axes.images[0].get_array().filled(math.nan)
    assert cells[1:3, :2].tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert cells[-2:, -2:].tolist() == [[39.1, 39.2], [39.3, 39.4]]
    assert math.isnan(cells[1, 2]) and all(math.isnan(value) for value in cells[0])
    names = [text for text in labels(axes.texts) if " " in text]
    assert len(names) == 12 and (names[0], names[-1]) == ("0 attn", "19 MLP")


def test_sources_are_called_by_what_they_are() -> None:
    metric = metrics_of("attnres")["attnres/weights"]
    for columns, last in ((5, "1 MLP"), (3, "block 2")):
        rows = [[0.2] * columns] * 5
        axes = axes_after(lambda axes, rows=rows: draw_heatmap(axes, rows, metric, gpt_places(2)))
        assert labels(axes.get_xticklabels())[:: columns - 1] == ["embedding", last]


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
