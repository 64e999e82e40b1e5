# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare training runs that differ in their residual connection: a table, a picture, a JSON file.

    python examples/demo_report.py runs/demo --runs residual mhc block_attnres

Losses and times are read from each run's TensorBoard files; bytes, parameters and depth attention
from what it recorded with ``--residual-log-interval``. What a run did not record is reported as
n/a, never as zero. ``megatron-residuals report`` draws all that one run recorded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.heatmap import draw_heatmap
from megatron_residuals.diagnostics.journal import Journal, read
from megatron_residuals.pipeline.layout import gpt_places
from megatron_residuals.text import table as aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "residual": "plain residual",
    "hc": "HC",
    "mhc": "mHC",
    "attnres": "Full AttnRes",
    "block_attnres": "Block AttnRes",
}
# Okabe and Ito's palette, told apart with every kind of colour vision; black is the baseline.
STYLES = (("#000000", "o"), ("#D55E00", "s"), ("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"))
WARMUP_STEPS = 5  # the first steps allocate and import
SMOOTHING_SHARE = 0.04  # a curve is averaged over this part of its length, ...
SMOOTHING_STEPS = 5  # ... and over no fewer steps than this, if it has them


@dataclass(frozen=True)
class Curve:
    """One scalar over training: ``values[i]`` was logged at iteration ``steps[i]``."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def smooth(self) -> Curve:
        """Trailing mean over a window of neighbouring values, from the first full one on."""
        if not self.values:
            return self
        length = len(self.values)
        window = min(length, max(SMOOTHING_STEPS, int(SMOOTHING_SHARE * length)))
        means = np.convolve(self.values, np.full(window, 1 / window), mode="valid")
        return Curve(self.steps[window - 1 :], tuple(means.tolist()))


@dataclass(frozen=True)
class Run:
    """What one run left behind; curves are empty and fields None where it left nothing."""

    name: str
    train: Curve = Curve()
    validation: Curve = Curve()
    step_seconds: Curve = Curve()
    tokens_per_step: int | None = None
    journal: Journal | None = None

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @property
    def depth_weights(self) -> list[list[float]]:
        """Mean weight of every source in every read, NaN where there is none; or nothing."""
        return (self.journal.last("attnres/weights") if self.journal else None) or []

    @property
    def bytes_sent_per_step(self) -> int | None:
        """Over all hops, in the last recorded step; 0 without a pipeline."""
        if self.journal is None:
            return None
        names = ("residual/bytes_forward", "residual/bytes_backward")
        return sum(int(sum(self.journal.last(name) or ())) for name in names)


@dataclass(frozen=True)
class Figures:
    """One row of the table; None where the run did not record it."""

    title: str
    config: str | None
    final_validation_loss: float | None
    tokens_per_second: float | None
    relative_tokens_per_second: float | None
    bytes_sent_per_step: int | None
    parameters_added: int | None


def read_run(folder: Path) -> Run:
    """Read ``FOLDER/tensorboard`` and what the run recorded in ``FOLDER``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    try:
        journal = read(folder)
    except ValueError:
        journal = None
    if not (folder / "tensorboard").is_dir():
        return Run(folder.name, journal=journal)
    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    tags = events.Tags()

    def curve(name: str) -> Curve:
        logged = events.Scalars(name) if name in tags["scalars"] else []
        # Where training ends at an evaluation, Megatron evaluates twice: the last one counts.
        by_step = {event.step: event.value for event in logged}
        return Curve(tuple(by_step), tuple(by_step.values()))

    def argument(name: str) -> int | None:
        tag = f"{name}/text_summary"  # Megatron writes its arguments as text
        if tag not in tags["tensors"]:
            return None
        return int(events.Tensors(tag)[-1].tensor_proto.string_val[0])

    batch, length = argument("global_batch_size"), argument("seq_length")
    return Run(
        name=folder.name,
        train=curve("lm loss"),
        validation=curve("lm loss validation"),
        step_seconds=curve("iteration-time"),
        tokens_per_step=batch * length if batch and length else None,
        journal=journal,
    )


def tokens_per_second(run: Run) -> float | None:
    """Of the median step, the first ``WARMUP_STEPS`` left out; None without enough steps."""
    seconds = run.step_seconds.values[WARMUP_STEPS:]
    if not seconds or run.tokens_per_step is None:
        return None
    return run.tokens_per_step / float(np.median(seconds))


def figures(run: Run, baseline: Run) -> Figures:
    """The run's row, speed relative to the baseline's."""
    speed, reference = tokens_per_second(run), tokens_per_second(baseline)
    header = run.journal.header if run.journal else {}
    return Figures(
        title=run.title,
        config=header.get("config"),
        final_validation_loss=run.validation.values[-1] if run.validation.values else None,
        tokens_per_second=speed,
        relative_tokens_per_second=speed / reference if speed and reference else None,
        bytes_sent_per_step=run.bytes_sent_per_step,
        parameters_added=header.get("parameters_added"),
    )


def table(rows: list[Figures]) -> str:
    """The rows as aligned text."""

    def cell(value: float | None, form: str) -> str:
        return "n/a" if value is None else form.format(value)

    def record(row: Figures) -> dict[str, str]:
        sent = row.bytes_sent_per_step
        return {
            "residual": row.title,
            "final val. loss": cell(row.final_validation_loss, "{:.4f}"),
            "tokens/s": cell(row.tokens_per_second, "{:,.0f}"),
            "vs. plain": cell(row.relative_tokens_per_second, "{:.2f}"),
            "sent per step": cell(None if sent is None else sent / 2**20, "{:.2f} MiB"),
            "params added": cell(row.parameters_added, "{:,}"),
        }

    header, *lines = aligned([record(row) for row in rows])
    return "\n".join([header, "-" * len(header), *lines])


def plot_losses(axes: Axes, runs: list[Run], unigram_nats: float | None) -> None:
    """Smoothed training loss as lines, validation loss as markers."""
    for run, (colour, marker) in zip(runs, cycle(STYLES), strict=False):
        smooth = run.train.smooth()
        axes.plot(smooth.steps, smooth.values, color=colour)
        axes.plot(
            run.validation.steps, run.validation.values, marker, color=colour, mfc="white", zorder=3
        )
        # One legend entry for both.
        axes.plot([], [], f"{marker}-", color=colour, mfc="white", label=run.title)
    if unigram_nats is not None:
        axes.axhline(unigram_nats, color="0.5", linestyle=":", label="unigram entropy of the data")
        if any(run.train.values and run.train.values[-1] < unigram_nats for run in runs):
            axes.set_ylim(top=1.15 * unigram_nats)  # the first steps would flatten all the rest
    axes.set_title("Loss: training (lines, smoothed) and validation (markers)")
    axes.set_ylabel("nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)


def gap(curve: Curve, reference: Curve) -> Curve:
    """The curve minus the reference, at the iterations that both have."""
    values = dict(zip(reference.steps, reference.values, strict=True))
    shared = [
        (step, value - values[step])
        for step, value in zip(curve.steps, curve.values, strict=True)
        if step in values
    ]
    return Curve(*zip(*shared, strict=True)) if shared else Curve()


def plot_gaps(axes: Axes, runs: list[Run], baseline: Run) -> None:
    """Losses minus the baseline's: every batch is the same for all runs, so its noise cancels."""
    for run, (colour, marker) in zip(runs, cycle(STYLES), strict=False):
        train = gap(run.train, baseline.train).smooth()
        validation = gap(run.validation, baseline.validation)
        axes.plot(train.steps, train.values, color=colour)
        if run is not baseline:
            axes.plot(
                validation.steps, validation.values, marker, color=colour, mfc="white", zorder=3
            )
    axes.set_title(f"Loss minus that of the {baseline.title} on the same batches")
    axes.set_xlabel("iteration")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("nats per byte")
    axes.grid(alpha=0.3)


def plot_depth_attention(axes: Axes, run: Run) -> None:
    """Mean weight of every source (column) in every sublayer's read (row)."""
    weights = run.depth_weights
    metric = metrics_of("block_attnres")["attnres/weights"]
    draw_heatmap(axes, weights, metric, gpt_places(len(weights) // 2))
    axes.set_title(f"{run.title}: what each sublayer reads")


def draw(runs: list[Run], baseline: Run, unigram_nats: float | None, path: Path) -> None:
    """Write the picture: losses, gaps to the baseline, and depth attention where there is some."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    readers = [run for run in runs if run.depth_weights]
    widths = [1.5] + [1.0] * len(readers)
    figure = plt.figure(figsize=(4.6 * sum(widths), 7), layout="constrained")
    grid = figure.add_gridspec(2, len(widths), width_ratios=widths, height_ratios=[2, 1])
    losses = figure.add_subplot(grid[0, 0])
    plot_losses(losses, runs, unigram_nats)
    plot_gaps(figure.add_subplot(grid[1, 0], sharex=losses), runs, baseline)
    for column, run in enumerate(readers, start=1):
        plot_depth_attention(figure.add_subplot(grid[:, column]), run)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(folder: Path, names: list[str], unigram_nats: float | None) -> str:
    """Write ``report.png`` and ``summary.json`` into the folder; return the table.

    Args:
        folder: holds one folder per run.
        names: of the runs; the first is the baseline.
        unigram_nats: drawn as a line into the loss plot.

    Raises:
        FileNotFoundError: a run's folder is missing.
    """
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing:
        present = sorted(path.name for path in folder.glob("*") if path.is_dir())
        raise FileNotFoundError(
            f"no run {missing} in {folder}, which holds {present}. Name runs that are there with "
            "--runs."
        )
    runs = [read_run(folder / name) for name in names]
    rows = [figures(run, runs[0]) for run in runs]
    by_name = {run.name: asdict(row) for run, row in zip(runs, rows, strict=True)}
    content = {"baseline": names[0], "unigram_entropy_nats": unigram_nats, "runs": by_name}
    (folder / "summary.json").write_text(json.dumps(content, indent=2) + "\n")
    draw(runs, runs[0], unigram_nats, folder / "report.png")
    return table(rows)


def main(arguments: list[str] | None = None) -> None:
    """Command line: report on the runs of a folder."""
    parser = argparse.ArgumentParser(description="Compare runs of different residual connections")
    parser.add_argument("folder", type=Path, help="holds one folder per run")
    parser.add_argument("--runs", nargs="+", required=True, help="folder names, baseline first")
    parser.add_argument("--data-summary", type=Path, help="the JSON file of prepare_data.py")
    given = parser.parse_args(arguments)
    unigram_nats = None
    if given.data_summary:
        unigram_nats = json.loads(given.data_summary.read_text())["unigram_entropy_nats"]
    print(f"\n{report(given.folder, given.runs, unigram_nats)}\n")
    print(f"{given.folder / 'report.png'}  {given.folder / 'summary.json'}")


if __name__ == "__main__":
    main()
