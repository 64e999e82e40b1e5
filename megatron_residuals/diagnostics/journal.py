# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON lines file of a run: a header for every start, then a line for every recorded step.

Standard library only, so that a report can be made where neither torch nor Megatron is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_residuals.diagnostics.catalogue import metrics_of

FILE_NAME = "residual_metrics.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class Journal:
    """A run as its file tells it; of what was trained again, the last time counts.

    Attributes:
        header: what the last start wrote: config, settings, num_layers, plan, recompute, ….
        steps: lines of recorded steps by iteration, ascending.
        losses: by name, then by iteration: every step, recorded or not.
    """

    path: Path
    header: dict[str, Any]
    steps: dict[int, dict[str, Any]]
    losses: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def mechanism(self) -> str:
        """Name of the mechanism."""
        return str(self.header["settings"]["mechanism"])

    @property
    def num_sublayers(self) -> int:
        """Sublayers of the whole model, two to a layer."""
        return 2 * int(self.header["num_layers"])

    def last(self, name: str) -> Any:
        """A series or matrix in the newest step that has it; None if there is none."""
        for step in reversed(self.steps.values()):
            for kind in ("series", "matrices"):
                if name in step[kind]:
                    return step[kind][name]
        return None

    def over_time(self, name: str) -> dict[int, list[float]]:
        """A series by iteration."""
        return {
            iteration: step["series"][name]
            for iteration, step in self.steps.items()
            if name in step["series"]
        }

    def metric_names(self) -> list[str]:
        """Names in the order of the catalogue."""
        present = {name for step in self.steps.values() for name in step["series"]}
        return [name for name in metrics_of(self.mechanism) if name in present]


class JournalWriter:
    """Appends to the file, a line at a time; the folder is made if need be."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """One line. NaN becomes null, which JSON has."""
        line = json.dumps(_finite({"kind": kind, **content}), separators=(",", ":"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def find(folder: Path) -> Path:
    """The file of a run: given itself, in the folder, or the only one below it.

    Raises:
        ValueError: there is none, or several.
    """
    if folder.is_file():
        return folder
    if (folder / FILE_NAME).is_file():
        return folder / FILE_NAME
    found = sorted(folder.rglob(FILE_NAME))
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(str(path.parent) for path in found)
        raise ValueError(f"{folder} holds several runs: {listed}; name one of them")
    raise ValueError(
        f"no {FILE_NAME} in {folder}; train with --residual-log-interval K, and look where the run "
        "said that it writes"
    )


def read(folder: Path) -> Journal:
    """The run of a folder (or of the file itself).

    Raises:
        ValueError: there is no such file, several, or not a line of a header in it.
    """
    path = find(folder)
    header: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    losses: dict[str, dict[int, float]] = {}
    has_started = False
    for line in _lines(path):
        if line["kind"] == "start":
            header, has_started = line, True
            continue
        if has_started:
            begin, has_started = min([line["iteration"], *map(int, line["losses"])]), False
            for earlier in (steps, *losses.values()):
                _forget(earlier, begin)
        steps[line["iteration"]] = line
        for iteration, by_name in line["losses"].items():
            for name, value in by_name.items():
                losses.setdefault(name, {})[int(iteration)] = value
    if not header:
        raise ValueError(f"{path} has no line that describes the run; is it a {FILE_NAME}?")
    ordered = {name: dict(sorted(values.items())) for name, values in losses.items() if values}
    return Journal(path, header, dict(sorted(steps.items())), ordered)


def _forget(by_iteration: dict[int, Any], begin: int) -> None:
    """Drop what lies ahead of a start: it is trained again, or was another run in this folder."""
    for iteration in [i for i in by_iteration if i >= begin]:
        del by_iteration[iteration]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # a run that was killed while it wrote
            continue
        if isinstance(line, dict) and line.get("kind") in ("start", "step"):
            yield _with_nan(line)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _with_nan(line: dict[str, Any]) -> dict[str, Any]:
    for name, values in line.get("series", {}).items():
        line["series"][name] = [math.nan if value is None else value for value in values]
    for name, rows in line.get("matrices", {}).items():
        line["matrices"][name] = [[math.nan if v is None else v for v in row] for row in rows]
    for by_name in line.get("losses", {}).values():
        by_name.update({name: math.nan for name, value in by_name.items() if value is None})
    return line
