# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON lines file of a run: a header for every start, then a line for every recorded step.

Standard library only, so that a report can be made where neither torch nor Megatron is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_residuals.config import MECHANISMS
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.pipeline.layout import Places, gpt_places, places_of

FILE_NAME = "residual_metrics.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class Journal:
    """A run as its file tells it; of what was trained again, the last time counts.

    Attributes:
        header: what the last start wrote: config, settings, num_layers, plan, recompute, ….
        steps: lines of recorded steps by iteration, ascending.
        losses: by name, then by iteration: every step, recorded or not.
        skipped: how many lines could not be read.
    """

    path: Path
    header: dict[str, Any]
    steps: dict[int, dict[str, Any]]
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    skipped: int = 0

    @property
    def mechanism(self) -> str:
        """Name of the mechanism."""
        return str(self.header["settings"]["mechanism"])

    @property
    def places(self) -> Places:
        """The sublayers of the whole model; those of a GPT where the header names no others."""
        kinds = self.header.get("layer_kinds")
        return places_of(kinds) if kinds else gpt_places(int(self.header["num_layers"]))

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
    """The run of a folder (or of the file itself). Lines that are damaged are skipped and counted.

    Raises:
        ValueError: there is no such file, several, or not a line of a header in it.
    """
    path = find(folder)
    header: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    losses: dict[str, dict[int, float]] = {}
    has_started, skipped = False, 0
    for text in filter(bytes.strip, path.read_bytes().splitlines()):
        try:
            line = _line(text)
        except _UNREADABLE:
            skipped += 1
            continue
        if line["kind"] == "start":
            header, has_started = line, True
            continue
        if has_started:
            begin, has_started = min([line["iteration"], *line["losses"]]), False
            _forget(steps, begin)
            for earlier in losses.values():
                _forget(earlier, begin)
        steps[line["iteration"]] = line
        for iteration, by_name in line["losses"].items():
            for name, value in by_name.items():
                losses.setdefault(name, {})[iteration] = value
    if not header:
        raise ValueError(f"{path} has no line that describes the run; is it a {FILE_NAME}?")
    ordered = {name: dict(sorted(values.items())) for name, values in losses.items() if values}
    return Journal(path, header, dict(sorted(steps.items())), ordered, skipped)


def _forget(by_iteration: dict[int, Any], begin: int) -> None:
    """Drop what lies ahead of a start: it is trained again, or was another run in this folder."""
    for iteration in [i for i in by_iteration if i >= begin]:
        del by_iteration[iteration]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


_OWN_MECHANISM = re.compile(r"\w+(\.\w+)*:\w+")  # module:NAME
# What taking a line apart raises that was cut short, overwritten, or written by something else.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def _line(text: bytes) -> dict[str, Any]:
    """A line of which every part that is drawn has the type that it must have."""
    line: dict[str, Any] = json.loads(text.decode("utf-8"))
    if line["kind"] == "start":
        return _header(_printable(line))
    if line["kind"] != "step":
        raise ValueError(f"the kind is {line['kind']!r}")
    return line | {
        "iteration": _count(line["iteration"]),
        "series": {name: _floats(values) for name, values in line["series"].items()},
        "matrices": {name: _matrix(rows) for name, rows in line["matrices"].items()},
        "losses": {
            _count(int(iteration)): {name: _float(value) for name, value in by_name.items()}
            for iteration, by_name in line["losses"].items()
        },
    }


def _header(line: dict[str, Any]) -> dict[str, Any]:
    name = line["settings"]["mechanism"]
    if name not in MECHANISMS and _OWN_MECHANISM.fullmatch(name) is None:
        raise ValueError(f"the mechanism is {name!r}")
    if not isinstance(line["config"], str):
        raise TypeError("no configuration")
    pipeline = dict(line.get("pipeline", {}))
    kinds = [[str(kind) for kind in kinds] for kinds in line.get("layer_kinds") or ()]
    counts = {"num_layers": _count(line["num_layers"])}
    return line | counts | {"pipeline": pipeline, "layer_kinds": kinds}


def _printable(value: Any) -> Any:
    """Text without what steers a terminal or has no place in a file; other values as they are."""
    if isinstance(value, str):
        return "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value
        )
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise TypeError(f"{value!r} counts nothing")
    return value


def _float(value: Any) -> float:
    """A number; NaN for null, which is how it is written, and for what is infinite."""
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    return float(value) if math.isfinite(value) else math.nan


def _floats(values: Any) -> list[float]:
    if not isinstance(values, list) or not values:
        raise TypeError("no list of numbers")
    return [_float(value) for value in values]


def _matrix(rows: Any) -> list[list[float]]:
    if not isinstance(rows, list) or len({len(row) for row in rows}) != 1:
        raise TypeError("no rows of one length")
    return [_floats(row) for row in rows]
