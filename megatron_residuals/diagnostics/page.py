# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The report on a run: one picture, and one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_residuals.diagnostics import panels
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.heatmap import Axes
from megatron_residuals.diagnostics.journal import Journal
from megatron_residuals.diagnostics.metric import Metric, summarise
from megatron_residuals.files import naming
from megatron_residuals.mechanisms import mechanism_in_file

COLUMNS = 3
PANEL_INCHES = (5.6, 3.7)


class Panel(NamedTuple):
    """One picture of the page; heatmaps are two rows high.

    It is left out where the run has not recorded the metric that it needs.
    """

    draw: Callable[[Axes], None]
    rows: int = 1
    needs: str | None = None


class Health(NamedTuple):
    """One line of the table: a metric's summary at the first and the last record."""

    name: str
    metric: Metric
    first: float
    last: float

    @property
    def verdict(self) -> str:
        """``ok``, ``look`` outside the healthy range, or nothing where there is no range."""
        if self.metric.low is None and self.metric.high is None:
            return ""
        return "ok" if self.metric.is_healthy(self.last) else "look"

    @property
    def healthy(self) -> str:
        """The range as text."""
        low, high = self.metric.low, self.metric.high
        if low is None:
            return "" if high is None else f"up to {high:g}"
        return f"from {low:g}" if high is None else f"{low:g} to {high:g}"


def health_of(run: Journal) -> list[Health]:
    """Every metric with one value for each place, in the order of the catalogue."""
    lines = []
    for name, metric in metrics_of(run.mechanism).items():
        over_time = list(run.over_time(name).values())
        if over_time:
            first, last = (
                summarise(values, metric.summary) for values in (over_time[0], over_time[-1])
            )
            lines.append(Health(name, metric, first, last))
    return lines


def panels_of(run: Journal, baseline: Journal | None) -> list[Panel]:
    """What is drawn for a run, in reading order."""
    chosen = [Panel(lambda axes: panels.draw_loss(axes, run, baseline))]
    if baseline is not None:
        chosen.append(Panel(lambda axes: panels.draw_loss_gap(axes, run, baseline)))
    chosen += [
        depth_panel(
            run, baseline, "residual/hidden_rms", "RMS of what each sublayer reads (dilution)"
        ),
        depth_panel(run, baseline, "residual/output_rms", "RMS of what each sublayer returns"),
        depth_panel(
            run,
            baseline,
            "residual/gradient_rms",
            "RMS of the gradient at each output",
            logarithmic=True,
        ),
    ]
    chosen += _of_mechanism(run)
    if run.last("residual/bytes_forward"):
        chosen.append(Panel(lambda axes: panels.draw_bytes(axes, run, baseline)))
    chosen.append(Panel(lambda axes: panels.draw_kept(axes, run, baseline)))
    return [panel for panel in chosen if panel.needs is None or run.last(panel.needs)]


def depth_panel(
    run: Journal,
    baseline: Journal | None,
    name: str,
    title: str,
    *,
    logarithmic: bool = False,
    at_least: tuple[float, float] | None = None,
) -> Panel:
    """A metric over depth, at three times."""
    return Panel(
        lambda axes: panels.draw_depth(
            axes, run, baseline, name, title, logarithmic=logarithmic, at_least=at_least
        ),
        needs=name,
    )


def _of_mechanism(run: Journal) -> list[Panel]:
    """What its entry draws, or every metric of its own."""
    try:
        entry = mechanism_in_file(run.mechanism)
    except ValueError:  # not installed here
        return []
    drawn = entry.panels(run)
    if drawn is not None:
        return drawn
    own = {f"{entry.prefix}/{metric.name}": metric for metric in entry.metrics}
    return [
        matrix_panel(run, name, metric.meaning)
        if metric.columns
        else depth_panel(run, None, name, metric.meaning)
        for name, metric in own.items()
    ]


def matrix_panel(run: Journal, name: str, title: str) -> Panel:
    """A metric with columns: the last heatmap."""
    return Panel(lambda axes: panels.draw_matrix(axes, run, name, title), rows=2, needs=name)


def draw(run: Journal, baseline: Journal | None) -> bytes:
    """The picture as PNG.

    Raises:
        ValueError: what the run recorded cannot be drawn, as numbers that no axis holds.
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = panels_of(run, baseline)
    places, num_rows = _arrange(chosen)
    width, height = PANEL_INCHES
    picture = io.BytesIO()
    # no text of a run is a formula, whatever dollars it has
    with naming(run.path, "cannot be drawn"), rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(width * COLUMNS, height * num_rows + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(num_rows, COLUMNS)
        for panel, (row, column) in zip(chosen, places, strict=True):
            panel.draw(figure.add_subplot(grid[row : row + panel.rows, column]))
        figure.suptitle(_title(run), fontsize=14)
        figure.savefig(picture, dpi=110)
    return picture.getvalue()


def _arrange(chosen: list[Panel]) -> tuple[list[tuple[int, int]], int]:
    """(row, column) of every panel, each at the first free place that has room; number of rows."""
    taken: set[tuple[int, int]] = set()
    places = []
    for panel in chosen:
        place = next(
            (row, column)
            for row in range(2 * len(chosen))
            for column in range(COLUMNS)
            if all((row + below, column) not in taken for below in range(panel.rows))
        )
        places.append(place)
        taken |= {(place[0] + below, place[1]) for below in range(panel.rows)}
    return places, 1 + max(row for row, _ in taken)


def _title(run: Journal) -> str:
    pipeline = run.header["pipeline"]
    return (
        f"{panels.label_of(run)}: {run.header['num_layers']} layers, "
        f"PP {pipeline.get('ranks', '?')} x VPP {pipeline.get('chunks', '?')}, "
        f"{len(run.steps)} records, "
        f"iterations {min(run.steps)} to {max(run.steps)}"
    )


def write(run: Journal, baseline: Journal | None, folder: Path) -> tuple[Path, Path]:
    """``residual_report.png`` and ``residual_report.html`` in a folder, which is made if need be.

    Raises:
        ValueError: the run has no recorded step.
        ImportError: matplotlib or Jinja2 is not installed.
        OSError: the folder or a file cannot be written.
    """
    if not run.steps:
        raise ValueError(f"{run.path} has no recorded step yet")
    data = draw(run, baseline)
    text = _html(run, baseline, data)
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "residual_report.png", folder / "residual_report.html"
    picture.write_bytes(data)
    page.write_text(text, encoding="utf-8")
    return picture, page


TEMPLATE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:1500px;margin:1.5em auto;padding:0 1em}
img{width:100%}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;
border-bottom:1px solid #ddd;vertical-align:top}td.n{text-align:right;font-variant-numeric:
tabular-nums}tr.look{background:#fff0d8}pre{background:#f6f6f6;padding:1em;overflow:auto}</style>
<h1>{{ title }}</h1>
<p><code>{{ run.config }}</code>, recompute {{ run.recompute }} (host: {{ run.host_recompute }}),
megatron_residuals {{ run.version }} on megatron-core {{ run.megatron_core }}</p>
{% if baseline %}<p>Baseline: {{ baseline }}</p>{% endif %}
<img alt="the panels of this report" src="data:image/png;base64,{{ picture }}">
<h2>Figures</h2>
<table><tr><th>metric</th><th>over depth</th><th>first</th><th>last</th><th>healthy</th>
<th></th><th>meaning; outside the range</th></tr>
{% for line in health %}<tr class="{{ line.verdict }}"><td><code>{{ line.name }}</code></td>
<td>{{ line.metric.summary }}</td><td class="n">{{ line.first | number }}</td>
<td class="n">{{ line.last | number }}</td><td>{{ line.healthy }}</td><td>{{ line.verdict }}</td>
<td>{{ line.metric.meaning }}{% if line.verdict != "ok" and line.metric.advice %};
<em>{{ line.metric.advice }}</em>{% endif %}</td></tr>
{% endfor %}</table>
<h2>What crosses the pipeline</h2>
<pre>{{ run.plan }}</pre>
</html>
"""


def _html(run: Journal, baseline: Journal | None, picture: bytes) -> str:
    """The page; the engine escapes whatever is put into it."""
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["number"] = _number
    return environment.from_string(TEMPLATE).render(
        title=_title(run),
        run=run.header,
        baseline=panels.label_of(baseline) if baseline else None,
        picture=base64.b64encode(picture).decode(),
        health=health_of(run),
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
