# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""From the summed vector of a step to named figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from megatron_residuals.diagnostics.catalogue import OF_THE_RUN, metrics_of
from megatron_residuals.diagnostics.fields import Fields
from megatron_residuals.diagnostics.metric import place_name, summarise
from megatron_residuals.diagnostics.probes import Probe
from megatron_residuals.pipeline.layout import Places


@dataclass(frozen=True)
class Record:
    """One recorded step.

    Attributes:
        series: by full metric name one value for each place on its axis; NaN where nothing was
            seen, as the gradient of what does not train.
        matrices: metrics with columns, a row for each place; NaN where a reader has no such column.
        losses: by iteration since the last record, and by name.
        figures: other numbers of the step, as the learning rate.
    """

    iteration: int
    series: dict[str, list[float]] = field(default_factory=dict)
    matrices: dict[str, list[list[float]]] = field(default_factory=dict)
    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def series_of(
    flat: Tensor, fields: Fields, probe: Probe
) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Series and matrices of a record, by full name, from the vector summed over all ranks.

    Args:
        flat: [fields.size], float64, on the CPU.
    """
    found = dict(_figures(flat, fields, probe))
    series: dict[str, list[float]] = {}
    matrices: dict[str, list[list[float]]] = {}
    for name, metric in metrics_of(probe.config.mechanism).items():
        if metric.name not in found or found[metric.name].numel() == 0:
            continue
        if metric.columns is None:
            series[name] = found[metric.name].tolist()
        else:
            matrices[name] = found[metric.name].tolist()
    return series, matrices


def _figures(flat: Tensor, fields: Fields, probe: Probe) -> Iterator[tuple[str, Tensor]]:
    def total(name: str) -> Tensor:
        return fields.view(flat, name)

    def per_token(name: str, tokens: str = "tokens") -> Tensor:
        values = total(name)
        count = total(tokens)[: len(values)]
        return values / count.view(-1, *[1] * (values.dim() - 1))

    yield "hidden_rms", per_token("hidden_square").sqrt()
    yield "output_rms", per_token("output_square").sqrt()
    yield "gradient_rms", per_token("gradient_square", "gradient_tokens").sqrt()
    for metric in OF_THE_RUN:
        yield metric.name, total(metric.name)
    yield from probe.figures(total, per_token)


def scalars_of(record: Record, mechanism: str, places: Places) -> dict[str, float]:
    """Every single number of a record by name, finite ones only; matrices have none.

    ``mhc/gain_forward_max``, a summary, and ``mhc_detail/gain_forward_layer_3_attention``: boards
    make a section of what is in front of the slash, and thousands of places would hide summaries.
    """
    scalars: dict[str, float] = {}
    for name, metric in metrics_of(mechanism).items():
        values = record.series.get(name)
        if values is None:
            continue
        if metric.axis == "run":
            scalars[name] = values[0]
            continue
        scalars[f"{name}_{metric.summary}"] = summarise(values, metric.summary)
        detail = name.replace("/", "_detail/")
        for index, value in enumerate(values):
            scalars[f"{detail}_{place_name(metric.axis, index, places)}"] = value
    return {name: value for name, value in scalars.items() if math.isfinite(value)}
