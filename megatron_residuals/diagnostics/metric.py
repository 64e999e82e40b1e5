# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a metric is, how the places it has values for are named, and how they are summarised.

Standard library only. Names begin with ``residual/`` (all mechanisms) or with the prefix of a
mechanism: ``hc/``, ``mhc/``, ``attnres/`` (Full and Block AttnRes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron_residuals.pipeline.layout import Places

Axis: TypeAlias = Literal["sublayer", "reader", "hop", "rank", "stage", "run"]
"""What a metric has one value for: a sublayer (attention and MLP count one each), a reader (the
sublayers and the head in front of the final norm), a hop between two pipeline stages, a pipeline
rank, a stage, or the run as a whole."""
Summary: TypeAlias = Literal["max", "min", "mean", "sum"]
Per: TypeAlias = Literal["token", "step"]
"""What a sum is taken over: tokens, to be divided by their number, or nothing but the step."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix of the mechanism.
        summary: how the values over the axis become the one number of ``<name>_<summary>``.
        columns: what a row of a matrix holds, where there is one row for each place on the axis.
        low, high: the healthy range of the summary; None where there is no limit.
        advice: what to do outside the range.
        per: how the sum of its name becomes its value; None where it is worked out of others.
    """

    name: str
    axis: Axis
    summary: Summary
    meaning: str
    columns: str | None = None
    low: float | None = None
    high: float | None = None
    advice: str = ""
    per: Per | None = None

    def is_healthy(self, value: float) -> bool:
        """Whether a summary lies in the healthy range; a NaN does not."""
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high) and value == value


def place_name(axis: Axis, index: int, places: Places) -> str:
    """``layer_3_attention``, ``layer_3_mlp``, ``output``, ``hop_2``, ``rank_0``, ``stage_5``.

    Layers count from 0 over the whole model, as in the keys of checkpoints (``decoder.layers.3``).
    """
    if axis not in ("sublayer", "reader"):
        return f"{axis}_{index}"
    return "output" if index == len(places) else "layer_{}_{}".format(*places[index])


def summarise(values: Sequence[float], how: Summary) -> float:
    """The max, min, mean or sum of the values that are numbers; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return math.nan
    if how == "mean":
        return sum(numbers) / len(numbers)
    if how == "sum":
        return sum(numbers)
    return max(numbers) if how == "max" else min(numbers)
