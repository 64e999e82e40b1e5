# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Draws what `benchmarks.kernels` recorded: time and peak memory of a mechanism and its peers.

python -m benchmarks.figures runs/bench/mhc.json docs/images/performance_mhc.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TITLES = {"mhc": "mHC, {streams} streams", "attnres": "Block AttnRes, {sources} sources"}
COLORS = {"float32": "C0", "bfloat16": "C1"}
OURS = "ours torch"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one figure."""
    args = parse(argv)
    draw(json.loads(args.record.read_text()), args.figure)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Where to read and to write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures")
    parser.add_argument("record", type=Path, help="what benchmarks.kernels wrote with --json")
    parser.add_argument("figure", type=Path, help="the picture to write, e.g. mhc.png")
    return parser.parse_args(argv)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Bars by candidate, forward below backward; the peak beside them, both for every dtype."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = record["sizes"]
    names = list(record[sizes["dtype"][0]])
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    times, peaks = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(sizes["dtype"])
    for index, dtype in enumerate(sizes["dtype"]):
        rows, color = record[dtype], COLORS[dtype]
        whole = rows[OURS]["forward_ms"] + rows[OURS]["backward_ms"]
        at = [
            place + height * (index - (len(sizes["dtype"]) - 1) / 2) for place in range(len(names))
        ]
        forward = [rows[name]["forward_ms"] / whole for name in names]
        backward = [rows[name]["backward_ms"] / whole for name in names]
        bar = dict(height=0.92 * height, color=color)
        times.barh(at, forward, label=f"{dtype}, forward", **bar)
        drawn = times.barh(
            at, backward, left=forward, alpha=0.45, label=f"{dtype}, backward", **bar
        )
        both = [sum(pair) for pair in zip(forward, backward, strict=True)]
        times.bar_label(drawn, [f" {total:.2f}" for total in both], fontsize=8)
        found = [rows[name]["peak_planes"] for name in names]
        drawn = peaks.barh(at, found, **bar)
        peaks.bar_label(drawn, [f" {planes:.1f}" for planes in found], fontsize=8)
    times.set(
        yticks=range(len(names)), yticklabels=names, xlabel="time of a step, ours = 1 in each dtype"
    )
    times.invert_yaxis()
    peaks.set(xlabel="peak memory of a step, planes per sublayer")
    for axis in (times, peaks):
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    title = TITLES[sizes["mechanism"]].format(**sizes)
    figure.suptitle(
        f"{title}: {sizes['tokens']:,} tokens, hidden size {sizes['hidden']:,}, {sizes['device']}, "
        f"{sizes['threads']} thread",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
