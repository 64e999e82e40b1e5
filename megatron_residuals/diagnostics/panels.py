# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The panels of a report, each a function of axes and runs. Drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.heatmap import Axes, draw_heatmap, every, sublayer_label
from megatron_residuals.diagnostics.journal import Journal
from megatron_residuals.diagnostics.metric import summarise

LOSS = "lm loss"
RUN, BASELINE = "#D55E00", "#000000"  # told apart with every kind of colour vision
SECOND = "#0072B2"
AGES = ("#F6C9A0", "#E8924A", "#B84A00")  # of one quantity at three times, the newest darkest
SMALLEST_DISTANCE = 1e-9  # of streams that are equal, on a logarithmic axis
SMOOTHING_SHARE, SMOOTHING_STEPS = 0.04, 5


def smooth(values: Sequence[float]) -> list[float]:
    """Trailing mean over a share of the run; one value for each full window."""
    window = min(len(values), max(SMOOTHING_STEPS, int(SMOOTHING_SHARE * len(values))))
    return [sum(values[i - window : i]) / window for i in range(window, len(values) + 1) if window]


def loss_of(run: Journal) -> dict[int, float]:
    """The training loss: ``lm loss``, or the first that the run has."""
    if LOSS in run.losses:
        return run.losses[LOSS]
    return next(iter(run.losses.values()), {})


def _curve(axes: Axes, steps: Sequence[int], values: Sequence[float], **style: object) -> None:
    smoothed = smooth(values)
    axes.plot(steps[len(steps) - len(smoothed) :], smoothed, **style)


def draw_loss(axes: Axes, run: Journal, baseline: Journal | None) -> None:
    """Smoothed training loss of the run and the baseline."""
    for journal, colour in ((baseline, BASELINE), (run, RUN)):
        if journal is not None and (losses := loss_of(journal)):
            _curve(axes, list(losses), list(losses.values()), color=colour, label=label_of(journal))
    axes.set_title("Training loss (smoothed)")
    _finish(axes, "iteration", "loss")


def draw_loss_gap(axes: Axes, run: Journal, baseline: Journal) -> None:
    """Loss minus the baseline's at the same iteration: noise of the data cancels."""
    own, other = loss_of(run), loss_of(baseline)
    shared = [iteration for iteration in own if iteration in other]
    axes.axhline(0, color=BASELINE, linewidth=1)
    _curve(axes, shared, [own[i] - other[i] for i in shared], color=RUN, label=label_of(run))
    axes.set_title("Loss minus the baseline's")
    _finish(axes, "iteration", "loss difference", legend=False)


def draw_depth(
    axes: Axes,
    run: Journal,
    baseline: Journal | None,
    name: str,
    title: str,
    *,
    logarithmic: bool = False,
    at_least: tuple[float, float] | None = None,
) -> None:
    """A series over depth, early, midway and last; the baseline's last one dashed.

    ``at_least`` is shown of the vertical axis, so that rounding does not look like a curve.
    """
    over_time = run.over_time(name)
    for (iteration, values), colour in zip(ages(over_time), AGES[-len(over_time) :], strict=False):
        axes.plot(values, color=colour, marker=".", label=f"iteration {iteration}")
    if baseline is not None and (last := baseline.last(name)):
        axes.plot(last, color=BASELINE, linestyle="--", label="baseline, last")
    if logarithmic:
        _logarithmic(axes)
    _show(axes, at_least)
    axes.set_title(title)
    ticks = every(len(next(iter(over_time.values()))), 9)
    axes.set_xticks(ticks, [sublayer_label(i, run.places) for i in ticks], size=8)
    _finish(axes, "depth (layer, sublayer)", "")


def ages(over_time: dict[int, list[float]]) -> list[tuple[int, list[float]]]:
    """The first, the middle and the last of a series over time; fewer where there are fewer."""
    items = list(over_time.items())
    if len(items) < 3:
        return items
    return [items[0], items[len(items) // 2], items[-1]]


def draw_composite_over_time(axes: Axes, run: Journal) -> None:
    """The largest composite gains over depth, both directions, against iterations."""
    family = run.mechanism
    for direction, colour in (("forward", RUN), ("backward", SECOND)):
        over_time = run.over_time(f"{family}/composite_{direction}")
        largest = [summarise(values, "max") for values in over_time.values()]
        axes.plot(list(over_time), largest, color=colour, marker=".", label=direction)
    metric = metrics_of(family)[f"{family}/composite_forward"]
    if metric.high is not None:
        axes.axhline(metric.high, color="0.6", linestyle=":", label="upper healthy end")
    if max(_tops(axes), default=1.0) > 20:
        _logarithmic(axes)
    else:
        _show(axes, (0.0, 1.1))
    axes.set_title("Largest composite gain over depth")
    _finish(axes, "iteration", "Amax gain")


def draw_summaries(axes: Axes, run: Journal, names: Sequence[str], title: str) -> None:
    """Summaries over depth of a few metrics against iterations."""
    colours = (RUN, SECOND, "#009E73", "#CC79A7")
    for name, colour in zip(names, colours, strict=False):
        how = metrics_of(run.mechanism)[name].summary
        over_time = run.over_time(name)
        values = [summarise(values, how) for values in over_time.values()]
        text = f"{name.partition('/')[2]} ({how} over depth)"
        axes.plot(list(over_time), values, color=colour, marker=".", label=text)
    _show(axes, (0.0, 1.4))  # room for the legend
    axes.set_title(title)
    _finish(axes, "iteration", "", legend_columns=2)


def draw_stream_distance(axes: Axes, run: Journal) -> None:
    """One minus the mean cosine of two streams, against iterations: small differences count."""
    name = f"{run.mechanism}/stream_cosine"
    metric = metrics_of(run.mechanism)[name]
    over_time = run.over_time(name)
    means = [summarise(values, metric.summary) for values in over_time.values()]
    distances = [max(1 - mean, SMALLEST_DISTANCE) for mean in means]
    axes.plot(list(over_time), distances, color=RUN, marker=".", label="mean over depth")
    if metric.high is not None:
        limit = 1 - metric.high
        axes.axhline(limit, color="0.6", linestyle=":", label="below: the streams are copies")
    _logarithmic(axes)
    axes.set_title("How different are the streams?")
    _finish(axes, "iteration", "1 - cosine of two streams")


def draw_matrix(axes: Axes, run: Journal, name: str, title: str) -> None:
    """The last heatmap of a metric with columns."""
    draw_heatmap(axes, run.last(name), metrics_of(run.mechanism)[name], run.places)
    axes.set_title(f"{title}, iteration {max(run.steps)}")


def draw_bytes(axes: Axes, run: Journal, baseline: Journal | None) -> None:
    """MiB over every hop in one step, both directions together."""
    pairs = [(run, RUN, -0.2)] + ([(baseline, BASELINE, 0.2)] if baseline is not None else [])
    for journal, colour, shift in pairs:
        forward = journal.last("residual/bytes_forward") or []
        backward = journal.last("residual/bytes_backward") or []
        total = [(f + b) / 2**20 for f, b in zip(forward, backward, strict=False)]
        label = f"{label_of(journal)}: {sum(total):.2f} MiB in all"
        axes.bar([i + shift for i in range(len(total))], total, 0.4, color=colour, label=label)
    hops = len(run.last("residual/bytes_forward") or [])
    shown = every(hops, 12) if hops else []
    axes.set_xticks(shown, [f"{i} to {i + 1}" for i in shown], size=8)
    axes.margins(y=0.3)  # room for the legend
    axes.set_title("Sent in one step, both directions")
    _finish(axes, "hop between stages", "MiB")


def draw_kept(axes: Axes, run: Journal, baseline: Journal | None) -> None:
    """MiB that one micro-batch leaves in every stage for its backward."""
    pairs = [(run, RUN, -0.2)] + ([(baseline, BASELINE, 0.2)] if baseline is not None else [])
    for journal, colour, shift in pairs:
        kept = [value / 2**20 for value in journal.last("residual/kept_bytes") or []]
        places = [i + shift for i in range(len(kept))]
        axes.bar(places, kept, 0.4, color=colour, label=label_of(journal))
    axes.set_xticks(every(len(run.last("residual/kept_bytes") or [0]), 12))
    axes.margins(y=0.3)
    axes.set_title("Kept for backward by one micro-batch")
    _finish(axes, "stage", "MiB")


def label_of(run: Journal) -> str:
    """The configuration without what concerns logging."""
    settings, shown = run.header["settings"], str(run.header["config"])
    for name in ("log_interval", "log_image_interval"):
        said = f"{name}={settings.get(name)}"
        shown = shown.replace(f", {said}", "").replace(said, "")
    return shown.replace("residual()", "plain residual").removesuffix("()")


def _logarithmic(axes: Axes) -> None:
    """Powers of ten are written out: nothing on the page is parsed as a formula."""
    from matplotlib.ticker import LogFormatter

    class PlainLabels(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""  # which it leaves without a label

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PlainLabels())
    axes.yaxis.set_minor_formatter(PlainLabels())


def _show(axes: Axes, at_least: tuple[float, float] | None) -> None:
    if at_least is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, at_least[0]), max(high, at_least[1]))


def _tops(axes: Axes) -> list[float]:
    values = [value for line in axes.lines for value in line.get_ydata()]
    return [float(value) for value in values if not math.isnan(value)]


def _finish(axes: Axes, x: str, y: str, *, legend: bool = True, legend_columns: int = 1) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, ncols=legend_columns)
