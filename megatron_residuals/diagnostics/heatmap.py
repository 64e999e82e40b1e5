# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Matrices over depth as pictures: what every sublayer reads. Needs matplotlib."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.metric import Metric
from megatron_residuals.pipeline.layout import ATTENTION, MLP, Places

Axes: TypeAlias = Any  # matplotlib.axes.Axes, imported where a figure is made

MAX_CELLS_WITH_NUMBERS = 200
MAX_TICKS = 24
LABELS = {ATTENTION: "attn", MLP: "MLP", "moe": "MoE", "mamba": "Mamba"}
TILES_ACROSS, TILES_DOWN = 3, 4


def sublayer_label(index: int, places: Places) -> str:
    """``3 attn``, ``3 MLP`` (layers from 0), or ``output`` for the read in front of the norm."""
    if index == len(places):
        return "output"
    layer, kind = places[index]
    return f"{layer} {LABELS.get(kind, kind.upper())}"


def source_label(source: int, num_sources: int, places: Places) -> str:
    """``embedding``, ``block 2``, or in Full AttnRes the sublayer whose output a source is."""
    if source == 0:
        return "embedding"
    is_full = num_sources == len(places) + 1
    return sublayer_label(source - 1, places) if is_full else f"block {source}"


def every(count: int, most: int = MAX_TICKS) -> list[int]:
    """At most ``most`` evenly spaced indices of ``count``, the first among them."""
    return list(range(0, count, -(-count // most)))


def draw_heatmap(axes: Axes, rows: list[list[float]], metric: Metric, places: Places) -> None:
    """One matrix: readers downwards, sources or streams across, numbers where they have room."""
    if metric.columns == "stream pair":
        _draw_tiles(axes, rows, places)
        return
    columns = len(rows[0])
    is_source = metric.columns == "source"
    _draw_cells(axes, rows, most=1.0 if is_source else None, spread_low=is_source)
    ticks = every(len(rows))
    axes.set_yticks(ticks, [sublayer_label(i, places) for i in ticks], size=8)
    across = every(columns)
    names = [source_label(j, columns, places) for j in across]
    if not is_source:
        names = [f"stream {j}" for j in across]
    axes.set_xticks(across, names, rotation=40, ha="right", rotation_mode="anchor", size=8)
    if is_source:
        growing = "" if columns == len(places) + 1 else "; the last of a row may still be growing"
        axes.set_xlabel(f"source{growing}")
    axes.set_ylabel("reading sublayer" if is_source else "sublayer")


def _draw_tiles(axes: Axes, rows: list[list[float]], places: Places) -> None:
    """A square matrix for each of some sublayers, from the first to the last."""
    n = math.isqrt(len(rows[0]))
    count = min(len(rows), TILES_ACROSS * TILES_DOWN)
    shown = [round(k * (len(rows) - 1) / max(1, count - 1)) for k in range(count)]
    down = -(-count // TILES_ACROSS)
    cells = [[math.nan] * (TILES_ACROSS * (n + 1) - 1) for _ in range(down * (n + 1))]
    for k, index in enumerate(shown):
        top, left = (k // TILES_ACROSS) * (n + 1) + 1, (k % TILES_ACROSS) * (n + 1)
        for i in range(n):
            cells[top + i][left : left + n] = rows[index][n * i : n * (i + 1)]
        label = sublayer_label(index, places)
        axes.text(left + (n - 1) / 2, top - 0.65, label, ha="center", va="bottom", size=8)
    _draw_cells(axes, cells)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)
    axes.set_xlabel("row: new stream, column: old stream; mean over tokens")


def _draw_cells(
    axes: Axes, rows: list[list[float]], *, most: float | None = None, spread_low: bool = False
) -> None:
    """Values as colours, from 0 or symmetric about it, and as numbers where there are few.

    Args:
        most: where the colours end; the largest value if None.
        spread_low: tell small values apart, by a scale of square roots.
    """
    from matplotlib.colors import Normalize, PowerNorm

    numbers = [value for row in rows for value in row if not math.isnan(value)]
    top = most or max([1e-12, *map(abs, numbers)])
    signed = any(value < 0 for value in numbers)
    scale = PowerNorm(0.5, 0, top) if spread_low else Normalize(-top if signed else 0, top)
    image = axes.imshow(
        rows,
        cmap="RdBu_r" if signed else "viridis",
        norm=scale,
        aspect="auto",
        interpolation="nearest",
    )
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    if len(numbers) > MAX_CELLS_WITH_NUMBERS:
        return
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if not math.isnan(value):
                dark = abs(value) > 0.6 * top if signed else scale(value) < 0.6
                colour = "white" if dark else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", size=7, color=colour)


def heatmaps(
    matrices: dict[str, list[list[float]]], mechanism: str, places: Places
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
        canvas: Any = FigureCanvasAgg(figure)  # whatever backend the program has chosen for pyplot
        axes = figure.add_subplot()
        draw_heatmap(axes, rows, metrics_of(mechanism)[name], places)
        axes.set_title(name)
        canvas.draw()
        pictures[name] = numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pictures
