# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Matrices over depth as pictures: what every sublayer reads. Needs matplotlib."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.metric import Metric

Axes: TypeAlias = Any  # matplotlib.axes.Axes, imported where a figure is made

MAX_CELLS_WITH_NUMBERS = 160
MAX_TICKS = 24


def sublayer_label(index: int, num_sublayers: int) -> str:
    """``3 attn``, ``3 MLP`` (layers from 0), or ``output`` for the read in front of the norm."""
    if index == num_sublayers:
        return "output"
    return f"{index // 2} {('attn', 'MLP')[index % 2]}"


def every(count: int, most: int = MAX_TICKS) -> list[int]:
    """At most ``most`` evenly spaced indices of ``count``, the first among them."""
    return list(range(0, count, -(-count // most)))


def draw_heatmap(axes: Axes, rows: list[list[float]], metric: Metric, num_sublayers: int) -> None:
    """One matrix: readers downwards, sources or streams across, numbers where they have room."""
    columns = len(rows[0])
    numbers = [value for row in rows for value in row if not math.isnan(value)]
    top = 1.0 if metric.columns == "source" else max([1e-12, *map(abs, numbers)])
    signed = any(value < 0 for value in numbers)
    image = axes.imshow(
        rows,
        cmap="RdBu_r" if signed else "viridis",
        vmin=-top if signed else 0,
        vmax=top,
        aspect="auto",
        interpolation="nearest",
    )
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    if len(rows) * columns <= MAX_CELLS_WITH_NUMBERS:
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    dark = abs(value) > 0.6 * top if signed else value < 0.6 * top
                    colour = "white" if dark else "black"
                    axes.text(j, i, f"{value:.2f}", ha="center", va="center", size=7, color=colour)
    ticks = every(len(rows))
    axes.set_yticks(ticks, [sublayer_label(i, num_sublayers) for i in ticks], size=8)
    across = every(columns)
    if metric.columns == "source":
        names = ["embedding" if j == 0 else f"block {j}" for j in across]
    else:
        names = [f"stream {j}" for j in across]
    axes.set_xticks(across, names, rotation=40, ha="right", rotation_mode="anchor", size=8)


def heatmaps(
    matrices: dict[str, list[list[float]]], mechanism: str, num_sublayers: int
) -> dict[str, Any]:
    """A picture of every matrix of a record, by full name: uint8 [height, width, 3].

    Raises:
        ImportError: matplotlib is not installed.
    """
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures = {}
    for name, rows in matrices.items():
        height = min(3 + 0.18 * len(rows), 14)
        figure = Figure(figsize=(min(4 + 0.35 * len(rows[0]), 14), height), layout="constrained")
        canvas = FigureCanvasAgg(figure)  # whatever backend the program has chosen for pyplot
        axes = figure.add_subplot()
        draw_heatmap(axes, rows, metrics_of(mechanism)[name], num_sublayers)
        axes.set_title(name)
        canvas.draw()
        pictures[name] = numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pictures
