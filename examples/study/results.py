# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON lines file of a study: a line for every run that ended, from what it recorded."""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo_report import Curve, read_run
from examples.study.design import TOKENS_PER_ITERATION, Cell, Losses

FILE = Path("docs/study/results.jsonl")
LIBRARIES = ("megatron-residuals", "megatron-core", "torch", "numpy")
TRAIN_STEPS = 20
"""A point of the kept training curve is the mean over so many iterations."""
SEEN = (
    "residual/hidden_rms",
    "residual/gradient_rms",
    "mhc/composite_forward",
    "mhc/composite_backward",
    "mhc/stream_cosine",
    "attnres/weights",
)
"""Series and matrices over depth that are kept, as recorded last."""

Points = list[list[float]]


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        cell: its settings.
        failed: the end of its log, if it failed; nothing else is there then.
        validation: (iteration, loss in nats per byte).
        train: the same, means over `TRAIN_STEPS` iterations.
        gradient_norm: (iteration, norm over all parameters before clipping).
        parameters_added: by the residual connection.
        cpu_s: CPU seconds of one iteration with everything about it, over legs of the run.
        seen: what was recorded over depth at the end.
        made: date, versions of libraries and Python, the processor.
    """

    cell: Cell
    failed: str = ""
    validation: Points = field(default_factory=list)
    train: Points = field(default_factory=list)
    gradient_norm: Points = field(default_factory=list)
    parameters_added: int = 0
    cpu_s: float = math.nan
    seen: dict[str, Any] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Final validation loss; infinite for a failed run."""
        return math.inf if self.failed else self.validation[-1][1]

    @property
    def tokens(self) -> int:
        """That it was trained on."""
        return self.cell.iterations * TOKENS_PER_ITERATION

    @property
    def line(self) -> str:
        """As it stands in the file."""
        return json.dumps(_rounded(asdict(self)), separators=(",", ":"), allow_nan=True)


def read(file: Path) -> list[Result]:
    """All runs of a file; none if there is no file.

    Raises:
        ValueError: a line is not one of ours.
    """
    results = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), start=1):
        try:
            record = json.loads(line)
            results.append(Result(**{**record, "cell": Cell(**record["cell"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file}, line {number} is not a run of the study: {error}. Take the line out, and "
                "the run is made again."
            ) from error
    return results


def losses(results: list[Result]) -> Losses:
    """What the choice of a learning rate is made from."""
    return {result.cell.name: result.loss for result in results}


def append(file: Path, result: Result) -> None:
    """Adds a run at the end."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(result.line + "\n")


def result_of(cell: Cell, folder: Path, cpu_s: float) -> Result:
    """What a run that came to its end has left in its folder.

    Raises:
        ValueError: it has not come to its end, or left no journal.
    """
    run = read_run(folder)
    if not run.validation.steps or run.validation.steps[-1] != cell.iterations or not run.journal:
        raise ValueError(f"{folder} has no validation loss at iteration {cell.iterations}")
    norms = {
        int(iteration): step["figures"]["grad-norm"]
        for iteration, step in run.journal.steps.items()
        if "grad-norm" in step["figures"]
    }
    return Result(
        cell,
        validation=_points(run.validation),
        train=_points(_means(run.train)),
        gradient_norm=[[iteration, norm] for iteration, norm in norms.items()],
        parameters_added=run.journal.header["parameters_added"],
        cpu_s=cpu_s,
        seen={name: value for name in SEEN if (value := run.journal.last(name)) is not None},
        made=_made(),
    )


def failure(cell: Cell, log: str) -> Result:
    """A run that ended with an error."""
    return Result(cell, failed=log[-2000:], made=_made())


def _made() -> dict[str, str]:
    libraries = {name: version(name) for name in LIBRARIES}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **libraries,
    }


def _means(curve: Curve) -> Curve:
    """Means over `TRAIN_STEPS` iterations, at the last of them."""
    whole = len(curve.steps) // TRAIN_STEPS * TRAIN_STEPS
    means = np.reshape(curve.values[:whole], (-1, TRAIN_STEPS)).mean(axis=1)
    return Curve(curve.steps[TRAIN_STEPS - 1 : whole : TRAIN_STEPS], tuple(means.tolist()))


def _points(curve: Curve) -> Points:
    return [list(point) for point in zip(curve.steps, curve.values, strict=True)]


def _rounded(value: Any) -> Any:
    """Six significant digits: float32 has no more to tell."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
    return value
