# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What one run's mechanism was and did, written by every rank and merged by the reader.

Standard library only, so that a report can be made where neither torch nor Megatron is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

PATTERN = "residual_summary.rank*.json"


@dataclass(frozen=True)
class RunSummary:
    """One rank's part of a summary, or the whole after ``merge``.

    Attributes:
        config: text form of the ``ResidualConfig``.
        parameters: number of elements of each parameter that the mechanism adds, by global name.
        bytes_per_step: payload bytes that arrived in the last training step, both directions.
        depth_weights: mean attention weights by reader (global sublayer index; the final read is
            the number of sublayers), source 0 first; empty for mechanisms without depth sources.
        num_sublayers: sublayers of the whole model.
    """

    mechanism: str
    config: str
    num_sublayers: int
    parameters: dict[str, int] = field(default_factory=dict)
    bytes_per_step: int = 0
    depth_weights: dict[int, list[float]] = field(default_factory=dict)

    @property
    def parameters_added(self) -> int:
        """Elements of all parameters that the mechanism adds to the model."""
        return sum(self.parameters.values())

    def write(self, folder: Path, rank: int) -> Path:
        """Write this rank's part into a folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PATTERN.replace("*", str(rank))
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        return path


def merge(parts: Iterable[RunSummary]) -> RunSummary:
    """The whole from the parts of all ranks.

    Raises:
        ValueError: there is no part, or the parts are of different runs.
    """
    parts = list(parts)
    configs = sorted({part.config for part in parts})
    if len(configs) != 1:
        raise ValueError(f"summaries of one run must share a configuration; found: {configs}")
    parameters: dict[str, int] = {}
    weights: dict[int, list[float]] = {}
    for part in parts:
        parameters.update(part.parameters)
        weights.update(part.depth_weights)
    return dataclasses.replace(
        parts[0],
        parameters=parameters,
        bytes_per_step=sum(part.bytes_per_step for part in parts),
        depth_weights=dict(sorted(weights.items())),
    )


def load(folder: Path) -> RunSummary:
    """The merged summary of a run's folder.

    Raises:
        FileNotFoundError: no rank wrote one there.
    """
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise FileNotFoundError(f"no {PATTERN} in {folder}; the run wrote no residual summary")
    return merge(_read(path) for path in paths)


def _read(path: Path) -> RunSummary:
    fields = json.loads(path.read_text())
    fields["depth_weights"] = {int(k): v for k, v in fields["depth_weights"].items()}
    return RunSummary(**fields)
