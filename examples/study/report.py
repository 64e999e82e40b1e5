# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the answer, the tables and the pictures of `docs/study.md` from the JSON lines file.

python -m examples.study.report
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from examples.demo_report import STYLES
from examples.study import results
from examples.study.analysis import Interval, Row, main_table, side_table, smoothed
from examples.study.design import ARMS, DEPTHS, FIRST, PLAIN, SAME, TOKENS_PER_ITERATION, tuning
from examples.study.results import FILE, Result
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.heatmap import draw_heatmap
from megatron_residuals.pipeline.layout import gpt_places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = Path("docs/study.md")
AT_DEPTH = [(arm, layers) for layers in DEPTHS for arm in FIRST[1:]]
SIDE = [
    *((f"{ARMS[arm].title}, {layers} layers", arm, layers) for arm, layers in AT_DEPTH),
    *((ARMS[arm].title, arm, 12) for arm in ("block1", "block4", "streams2", "streams8")),
]
PICTURES = (
    "![Training loss by tokens and by CPU time, mean over seeds](study/curves.png)",
    "![What the runs recorded over depth at their end](study/mechanisms.png)",
)


def markdown(records: list[dict[str, str]]) -> str:
    """Records of equal keys as a table."""
    heads = list(records[0])
    lines = [heads, ["---"] * len(heads), *([record[head] for head in heads] for record in records)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def record(row: Row) -> dict[str, str]:
    """One line of a table."""
    difference = list(row.difference.values())
    reached = [share for share in row.tokens.values() if math.isfinite(share)]
    is_plain = row.title == ARMS[PLAIN].title
    runs = f"{len(row.runs)}" + (f", {row.failed} failed" if row.failed else "")
    never = len(row.tokens) - len(reached)
    tokens = f"{100 * np.mean(reached):.0f} %" if reached else ""
    if never:
        tokens += f"{', ' if tokens else ''}not in {never} of {len(row.tokens)}"
    added = max((run.parameters_added for run in row.runs.values()), default=0)
    return {
        "residual": row.title,
        "seeds": runs,
        "rate": f"{row.rate:g}",
        "validation loss": interval(row.loss) if row.runs else "",
        "minus plain, same seed": "" if is_plain else interval(Interval.of(difference), "+"),
        "p (Holm)": "" if math.isnan(row.holm) else f"{row.holm:.2g}",
        "answer": "" if is_plain else row.answer,
        "tokens to plain's loss": "" if is_plain or row.title == SAME else tokens,
        "CPU time": f"{row.cost:.2f}",
        "parameters": f"+{added:,}",
    }


def interval(value: Interval, sign: str = "") -> str:
    """Mean and half the width of its interval."""
    half = "" if math.isnan(value.low) else f" ± {(value.high - value.low) / 2:.4f}"
    return f"{value.mean:{sign}.4f}{half}"


def answer(rows: list[Row]) -> str:
    """The table, a sentence for each of the arms that the question is about, one on the noise."""
    sentences = [sentence(row) for row in rows if row.title in titles(FIRST[1:])]
    again = [row for row in rows if row.title == SAME]
    if again and again[0].difference:
        spread = max(abs(value) for value in again[0].difference.values())
        sentences.append(
            f"The noise beside it: two plain models of other seeds differ by up to {spread:.4f}."
        )
    return "\n\n".join([" ".join(sentences), markdown([record(row) for row in rows])])


def sentence(row: Row) -> str:
    """What the table says of one arm."""
    difference = Interval.of(list(row.difference.values()))
    seeds = f"{len(row.difference)} {'seed' if len(row.difference) == 1 else 'seeds'}"
    return (
        f"{row.title}: {row.answer}, {interval(difference, '+')} nats per byte against the plain "
        f"residual over {seeds}, at {row.cost:.2f} of its CPU time."
    )


def titles(arms: Iterable[str]) -> list[str]:
    """As tables name them."""
    return [ARMS[arm].title for arm in arms]


def tuning_table(all_results: list[Result]) -> str:
    """Every run that chose a learning rate."""
    losses = {result.cell: _loss(result) for result in all_results}
    records = [
        {"residual": ARMS[arm].title}
        | {f"rate {cell.rate:g}": losses.get(cell, "") for cell in tuning(arm)}
        for arm in ARMS
        if any(cell in losses for cell in tuning(arm))
    ]
    return markdown(records) if records else ""


def _loss(result: Result) -> str:
    return "failed" if result.failed else f"{result.loss:.4f}"


def style_of(row: Row) -> tuple[str, str]:
    """Colour and marker, the same in every picture."""
    return STYLES[titles(ARMS).index(row.title) % len(STYLES)]


def draw_answer(axes: Axes, rows: list[Row]) -> None:
    """Differences to the plain residual: a dot for every seed, a bar for the interval."""
    rows = [row for row in rows if row.title != ARMS[PLAIN].title and row.difference]
    for height, row in enumerate(reversed(rows)):
        values = list(row.difference.values())
        mean = Interval.of(values)
        colour = "0.5" if row.title == SAME else "#0072B2"
        axes.plot(values, [height] * len(values), "o", color=colour, alpha=0.4, ms=4)
        if not math.isnan(mean.low):
            axes.plot([mean.low, mean.high], [height, height], color=colour)
        axes.plot(mean.mean, height, "|", color=colour, ms=14, mew=2)
    axes.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
    axes.axvline(0, color="0.3", lw=0.8)
    axes.set_xlabel(
        "validation loss minus plain's on the same seed, nats per byte (left is better)"
    )
    axes.grid(axis="x", alpha=0.3)


def draw_gaps(axes: Axes, rows: list[Row], along: Callable[[Result], float], label: str) -> None:
    """Training loss, mean over seeds, along a measure of one iteration."""
    for row in rows:
        colour, _ = style_of(row)
        curves = [smoothed(run) for run in row.runs.values()]
        step = np.mean([along(run) for run in row.runs.values()])
        axes.plot(curves[0][0] * step, np.mean([c[1] for c in curves], axis=0), color=colour)
        axes.plot([], [], color=colour, label=row.title)
    axes.set_xlabel(label)
    axes.set_ylabel("training loss, nats per byte")
    last = min(smoothed(run)[1][-1] for row in rows for run in row.runs.values())
    axes.set_ylim(0.97 * last, 1.6 * last)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_depth(axes: Axes, rows: list[Row], name: str, title: str, *, log: bool = False) -> None:
    """A series over depth at the end of training, mean over seeds."""
    for row in rows:
        colour, marker = style_of(row)
        series = [run.seen[name] for run in row.runs.values() if name in run.seen]
        if series:
            axes.plot(np.mean(series, axis=0), marker, ls="-", color=colour, ms=3, label=row.title)
    axes.set_title(title, size=10)
    axes.set_xlabel("sublayer")
    if log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)


def draw(rows: list[Row], folder: Path) -> None:
    """`answer.png`, `curves.png` and `mechanisms.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.35 * len(rows)), layout="constrained")
    draw_answer(axes, rows)
    figure.savefig(folder / "answer.png", dpi=120)

    first = [row for row in rows if row.title in titles(FIRST) and row.runs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    draw_gaps(left, first, lambda _: TOKENS_PER_ITERATION / 1e6, "million tokens")
    draw_gaps(right, first, lambda run: run.cpu_s / 60, "minutes of one core")
    figure.savefig(folder / "curves.png", dpi=120)

    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    streams = [row for row in rows if row.title in titles(["hc", "mhc"]) and row.runs]
    draw_depth(axes[0, 0], first, "residual/hidden_rms", "hidden state, root mean square", log=True)
    draw_depth(axes[0, 1], first, "residual/gradient_rms", "its gradient", log=True)
    draw_depth(axes[0, 2], streams, "mhc/composite_forward", "composite gain, forward", log=True)
    draw_depth(axes[1, 0], streams, "mhc/composite_backward", "composite gain, backward", log=True)
    draw_depth(axes[1, 1], streams, "mhc/stream_cosine", "cosine between streams")
    draw_reads(axes[1, 2], [row for row in first if row.title == ARMS["block"].title])
    figure.savefig(folder / "mechanisms.png", dpi=120)
    plt.close("all")


def draw_reads(axes: Axes, rows: list[Row]) -> None:
    """Weights of the first seed of Block AttnRes."""
    for run in list(rows[0].runs.values())[:1] if rows else ():
        metric = metrics_of("block_attnres")["attnres/weights"]
        draw_heatmap(axes, run.seen["attnres/weights"], metric, gpt_places(run.cell.layers))
        axes.set_title(f"what Block AttnRes reads, seed {run.cell.seed}", size=10)


def written(page: str, name: str, text: str) -> str:
    """The page with another text between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: the page has no such place.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- /{name} -->)", re.S)
    if not pattern.search(page):
        raise ValueError(f"the page has no place <!-- {name} --> … <!-- /{name} -->")
    return pattern.sub(lambda found: found[1] + text + found[2], page)


def report(all_results: list[Result], page: Path) -> None:
    """Writes the page's places, and the pictures into the folder `study` beside it."""
    rows, side = main_table(all_results), side_table(all_results, SIDE)
    failed = [result.cell.name for result in all_results if result.failed]
    is_drawn = any(row.difference for row in rows[1:])
    parts = {
        "answer": answer(rows) if rows else "No run of the main table has ended yet.",
        "tuning": tuning_table(all_results) or "None has ended yet.",
        "side": markdown([record(row) for row in side]) if side else "None has ended yet.",
        "failed": "Failed runs: " + (", ".join(failed) or "none") + ".",
        "pictures": "None yet.",
    }
    if is_drawn:
        folder = page.parent / "study"
        folder.mkdir(exist_ok=True)
        draw(rows, folder)
        parts["answer"] += "\n\n![Differences to the plain residual](study/answer.png)"
        parts["pictures"] = "\n\n".join(PICTURES)
    text = page.read_text()
    for name, part in parts.items():
        text = written(text, name, part)
    page.write_text(text)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Tables and pictures of the study")
    parser.add_argument("--results", type=Path, default=FILE)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    report(results.read(given.results), given.page)
    print(given.page)


if __name__ == "__main__":
    main()
