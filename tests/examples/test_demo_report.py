# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's report: figures from what the runs recorded, and n/a for what they did not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from examples import demo_report
from examples.demo_report import Curve, Run
from megatron_residuals.diagnostics.journal import JournalWriter, read

SECONDS = [9.0, 8.0, 7.0, 6.0, 5.0, 0.5, 0.25, 0.5]  # five slow first steps, median of the rest 0.5
NAN = float("nan")
WEIGHTS = [[1.0, NAN, NAN], [0.75, 0.25, NAN], [0.5, 0.3, 0.2]]


def write_events(folder: Path, *, seconds: list[float], losses: list[float]) -> None:
    """TensorBoard files as Megatron writes them."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("global_batch_size", "8")
        writer.add_text("seq_length", "128")
        for step, loss in enumerate(losses, start=1):
            writer.add_scalar("lm loss", loss, step)
        for step, value in enumerate(seconds, start=2):
            writer.add_scalar("iteration-time", value, step)
        writer.add_scalar("lm loss validation", 3.5, 4)
        writer.add_scalar("lm loss validation", 2.25, len(losses))


def write_journal(
    folder: Path, mechanism: str, *, parameters: int = 0, weights: object = None
) -> None:
    """What a run of two sublayers records."""
    journal = JournalWriter(folder)
    settings = {"mechanism": mechanism}
    header = {"config": f"{mechanism}()", "settings": settings, "num_layers": 1}
    journal.write("start", {**header, "parameters_added": parameters})
    sent = {"residual/bytes_forward": [2**19, 2**19], "residual/bytes_backward": [2**20]}
    matrices = {} if weights is None else {"attnres/weights": weights}
    for iteration in (1, 10):  # the last one counts
        series = {name: [iteration * size / 10 for size in sizes] for name, sizes in sent.items()}
        step = {"iteration": iteration, "losses": {}, "series": series, "matrices": matrices}
        journal.write("step", step)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A baseline, a run twice as slow that recorded everything, and one that recorded nothing."""
    losses = list(np.linspace(5, 3, 8))
    write_events(tmp_path / "residual", seconds=SECONDS, losses=losses)
    write_journal(tmp_path / "residual", "residual")
    slower = [2 * value for value in SECONDS]
    write_events(tmp_path / "block_attnres", seconds=slower, losses=losses)
    write_journal(tmp_path / "block_attnres", "block_attnres", parameters=192, weights=WEIGHTS)
    (tmp_path / "mhc").mkdir()
    return tmp_path


def test_summary_json_holds_every_figure_of_the_table(runs: Path) -> None:
    text = demo_report.report(runs, ["residual", "block_attnres"], 3.2)
    content = json.loads((runs / "summary.json").read_text())
    assert content["baseline"] == "residual"
    assert content["unigram_entropy_nats"] == 3.2
    assert content["runs"]["block_attnres"] == {
        "title": "Block AttnRes",
        "config": "block_attnres()",
        "final_validation_loss": 2.25,
        "tokens_per_second": 8 * 128 / 1.0,
        "relative_tokens_per_second": 0.5,
        "bytes_sent_per_step": 2 * 2**20,
        "parameters_added": 192,
    }
    row = next(line for line in text.splitlines() if line.startswith("Block AttnRes"))
    assert row.split()[2:] == ["2.2500", "1,024", "0.50", "2.00", "MiB", "192"]


def test_nothing_added_is_zero_and_nothing_recorded_is_not(runs: Path) -> None:
    text = demo_report.report(runs, ["residual", "mhc"], None)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows["plain residual"].split()[-1] == "0"
    assert rows["mHC"].split() == ["mHC", *["n/a"] * 5]
    recorded = json.loads((runs / "summary.json").read_text())["runs"]["mhc"]
    assert {value for key, value in recorded.items() if key != "title"} == {None}


def test_without_a_baseline_speed_the_relative_one_is_not_available(runs: Path) -> None:
    demo_report.report(runs, ["mhc", "block_attnres"], None)
    row = json.loads((runs / "summary.json").read_text())["runs"]["block_attnres"]
    assert row["tokens_per_second"] == 1024.0
    assert row["relative_tokens_per_second"] is None


def test_a_run_no_longer_than_the_first_steps_has_no_speed() -> None:
    seconds = Curve(tuple(range(5)), (1.0,) * 5)
    assert demo_report.tokens_per_second(Run("x", step_seconds=seconds, tokens_per_step=8)) is None


def test_the_figures_do_not_depend_on_how_many_events_there_are(tmp_path: Path) -> None:
    # TensorBoard's reader keeps a random sample of 10 000 scalars unless told otherwise.
    losses = [float(i) for i in range(10_050)]
    write_events(tmp_path / "residual", seconds=SECONDS, losses=losses)
    run = demo_report.read_run(tmp_path / "residual")
    assert run.train == Curve(tuple(range(1, 10_051)), tuple(losses))


@pytest.mark.parametrize(("length", "window"), [(3, 3), (20, 5), (200, 8)])
def test_smoothing_is_a_trailing_mean_that_starts_with_a_full_window(
    length: int, window: int
) -> None:
    steps, values = tuple(range(1, length + 1)), tuple(float(i * i) for i in range(length))
    smooth = Curve(steps, values).smooth()
    assert smooth.steps == steps[window - 1 :]
    means = [np.mean(values[i : i + window]) for i in range(length - window + 1)]
    assert smooth.values == pytest.approx(means)


def test_an_empty_curve_stays_empty() -> None:
    assert Curve().smooth() == Curve()


def test_of_two_evaluations_at_one_iteration_the_last_counts(tmp_path: Path) -> None:
    # Training that ended at an evaluation had two marks, and gaps that compared one with the other.
    write_events(tmp_path / "mhc", seconds=SECONDS, losses=[4.0] * 4)
    assert demo_report.read_run(tmp_path / "mhc").validation == Curve((4,), (2.25,))


def test_gaps_are_taken_where_both_runs_have_a_value() -> None:
    reference = Curve((1, 2, 3), (5.0, 4.0, 3.5))
    assert demo_report.gap(Curve((2, 3, 4), (3.0, 4.0, 1.0)), reference) == Curve((2, 3), (-1, 0.5))
    assert demo_report.gap(Curve((9,), (3.0,)), reference) == Curve()


def test_the_gap_of_the_baseline_is_zero_and_that_of_others_has_validation_marks() -> None:
    axes = Figure().subplots()
    baseline = Run("residual", train=Curve((1, 2), (5.0, 4.0)), validation=Curve((2,), (4.5,)))
    other = Run("mhc", train=Curve((1, 2), (3.0, 4.5)), validation=Curve((2,), (4.0,)))
    demo_report.plot_gaps(axes, [baseline, other], baseline)
    lines = [list(line.get_ydata()) for line in axes.get_lines()]
    assert lines == [[0], [-0.75], [-0.5]]  # two steps smoothed to one, and the mark


@pytest.mark.parametrize(("last", "cut"), [(2.0, True), (3.5, False)])
def test_the_first_steps_are_cut_off_once_the_loss_is_below_the_unigrams(
    last: float, cut: bool
) -> None:
    axes = Figure().subplots()
    curve = Curve(tuple(range(9)), (*[6.0] * 8, last))
    demo_report.plot_losses(axes, [Run("residual", train=curve)], 3.0)
    assert (axes.get_ylim()[1] < 5.0) == cut


def test_every_run_has_one_legend_entry_and_a_colour_of_its_own() -> None:
    axes = Figure().subplots()
    curve = Curve(tuple(range(9)), tuple(np.linspace(4, 2, 9).tolist()))
    runs = [Run(name, train=curve, validation=Curve((8,), (2.0,))) for name in demo_report.TITLES]
    demo_report.plot_losses(axes, runs, 3.0)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [*demo_report.TITLES.values(), "unigram entropy of the data"]
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) == 5]
    assert len({line.get_color() for line in curves}) == len(runs)


def test_the_heatmap_leaves_sources_that_do_not_exist_yet_empty(runs: Path) -> None:
    axes = Figure().subplots()
    journal = read(runs / "block_attnres")
    demo_report.plot_depth_attention(axes, Run("block_attnres", journal=journal))
    (image,) = axes.get_images()
    grid = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_array_equal(grid, WEIGHTS)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0 attn", "0 MLP", "output"]
    # a block for each sublayer, which is what Full AttnRes calls its sources
    assert [t.get_text() for t in axes.get_xticklabels()] == ["embedding", "0 attn", "0 MLP"]


def test_the_picture_has_a_heatmap_only_for_runs_with_depth_attention(runs: Path) -> None:
    from matplotlib import image

    shapes = []
    for names in (["residual", "mhc"], ["residual", "mhc", "block_attnres"]):
        demo_report.report(runs, names, 3.2)
        shapes.append(image.imread(runs / "report.png").shape)
    (height, width, _), (same_height, wider, _) = shapes
    assert same_height == height
    assert wider > 1.5 * width


def test_runs_that_are_not_there_are_named_together_with_those_that_are(runs: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\['hc', 'attnres'\].*'block_attnres', 'mhc'"):
        demo_report.report(runs, ["residual", "hc", "attnres"], None)


def test_the_command_line_prints_the_table_and_where_the_rest_is(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "data.json").write_text('{"unigram_entropy_nats": 3.1}')
    arguments = [str(runs), "--runs", "residual", "block_attnres"]
    demo_report.main([*arguments, "--data-summary", str(runs / "data.json")])
    output = capsys.readouterr().out
    assert "Block AttnRes" in output
    assert f"{runs / 'report.png'}  {runs / 'summary.json'}" in output
    assert json.loads((runs / "summary.json").read_text())["unigram_entropy_nats"] == 3.1
