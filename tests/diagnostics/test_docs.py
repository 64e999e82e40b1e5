# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""docs/diagnostics.md has every metric of the catalogue, with its range and its advice."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_residuals.config import MECHANISMS
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.metric import Metric
from megatron_residuals.diagnostics.page import Health
from megatron_residuals.mcore.training import publish

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnostics.md"


def named() -> dict[Metric, list[str]]:
    """Every metric with the full names under which mechanisms report it."""
    found: dict[Metric, list[str]] = {}
    for mechanism in MECHANISMS:
        for name, metric in metrics_of(mechanism).items():
            if name not in found.setdefault(metric, []):
                found[metric].append(name)
    return found


def row_of(metric: Metric, names: list[str]) -> str:
    """The metric's line of a table; run this file's body to write them anew."""
    shown = ", ".join(f"`{name}`" for name in names)
    over = metric.axis + (f" × {metric.columns}" if metric.columns else "")
    healthy = Health("", metric, 0.0, 0.0).healthy or "none"
    meaning = metric.meaning.replace("|", "\\|")
    return (
        f"| {shown} | {over} | {metric.summary} | {meaning} | {healthy} | {metric.advice or '–'} |"
    )


def test_the_page_has_a_line_for_every_metric_and_no_other() -> None:
    prefixes = {name.partition("/")[0] for names in named().values() for name in names}
    found = rf"^\| `(?:{'|'.join(prefixes)})/.*$"
    lines = re.findall(found, PAGE.read_text(), re.MULTILINE)
    assert sorted(lines) == sorted(row_of(metric, names) for metric, names in named().items())


def test_the_page_names_the_folders_in_their_order() -> None:
    text = PAGE.read_text()
    named = [publish.FOLDER_VARIABLE, "--save", "--tensorboard-dir", "--wandb-save-dir"]
    places = [text.index(f"`{name}`") for name in named]
    assert places == sorted(places)
