# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""From the summed vector of a step to named figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.fields import Fields
from megatron_residuals.diagnostics.metric import place_name, summarise
from megatron_residuals.diagnostics.statistics import composite_gains
from megatron_residuals.mechanisms.streams import Streams

# Fields that hold sums of squares or sums over tokens, by what divides them.
_PER_TOKEN = ("gain_forward", "gain_backward", "row_error", "column_error", "diagonal")
_PER_TOKEN += ("pre_saturated", "post_saturated", "stream_cosine", "read_weights", "write_weights")
_PER_TOKEN += ("weights", "entropy", "peak")
_AS_THEY_ARE = ("bytes_forward", "bytes_backward", "cache_bytes", "kept_bytes", "parameters_added")
_AS_THEY_ARE += ("query_norm", "key_gain_rms")
_GATES = {"mhc": ("alpha_pre", "alpha_post", "alpha_res"), "hc": ("scale_alpha", "scale_beta")}


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
    flat: Tensor, fields: Fields, residual: ResidualConfig, depth: DepthMap | None
) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Series and matrices of a record, by full name, from the vector summed over all ranks.

    Args:
        flat: [fields.size], float64, on the CPU.
        depth: the depth map of mechanisms with sources.
    """
    found = {name: values for name, values in _figures(flat, fields, residual, depth)}
    series: dict[str, list[float]] = {}
    matrices: dict[str, list[list[float]]] = {}
    for name, metric in metrics_of(residual.mechanism).items():
        if metric.name not in found or found[metric.name].numel() == 0:
            continue
        if metric.columns is None:
            series[name] = found[metric.name].tolist()
        else:
            matrices[name] = found[metric.name].tolist()
    return series, matrices


def _figures(
    flat: Tensor, fields: Fields, residual: ResidualConfig, depth: DepthMap | None
) -> Iterator[tuple[str, Tensor]]:
    def view(name: str) -> Tensor:
        return fields.view(flat, name)

    def per_token(name: str, tokens: str = "tokens") -> Tensor:
        values = view(name)
        count = view(tokens)[: len(values)]
        return values / count.view(-1, *[1] * (values.dim() - 1))

    yield "hidden_rms", per_token("hidden_square").sqrt()
    yield "output_rms", per_token("output_square").sqrt()
    yield "gradient_rms", per_token("gradient_square", "gradient_tokens").sqrt()
    for name in _AS_THEY_ARE:
        if name in fields.shapes:
            yield name, view(name)
    for name in _PER_TOKEN:
        if name in fields.shapes and name != "weights":
            yield name, per_token(name)
    if isinstance(residual.entry, Streams):
        yield "pre_mean", per_token("read_weights").mean(-1)
        yield "post_mean", per_token("write_weights").mean(-1)
        yield "stream_rms", per_token("stream_square").sqrt()
        if residual.mechanism == "mhc" or residual.hc_dynamic:
            for column, name in enumerate(_GATES[residual.mechanism]):
                yield name, view("gates")[:, column]
        tokens = int(view("matrix_tokens").min().item())
        matrices = view("matrices")[:, :tokens]
        yield "mixing", matrices.mean(1).flatten(1)
        forward, backward = composite_gains(matrices)
        yield "composite_forward", forward
        yield "composite_backward", backward
    if depth is not None:
        weights = per_token("weights")
        num_read = [depth.num_read(i) for i in range(len(weights))]
        yield "embedding_mass", weights[:, 0].clone()
        yield (
            "open_mass",
            torch.stack([row[m - 1] for row, m in zip(weights, num_read, strict=True)]),
        )
        for row, m in zip(weights, num_read, strict=True):
            row[m:] = math.nan
        yield "weights", weights


def scalars_of(record: Record, mechanism: str) -> dict[str, float]:
    """Every single number of a record by name, finite ones only; matrices have none.

    ``mhc/gain_forward_max``, a summary, and ``mhc_detail/gain_forward_layer_3_attention``: boards
    make a section of what is in front of the slash, and thousands of places would hide summaries.
    """
    scalars: dict[str, float] = {}
    num_sublayers = len(record.series.get("residual/output_rms", ()))
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
            scalars[f"{detail}_{place_name(metric.axis, index, num_sublayers)}"] = value
    return {name: value for name, value in scalars.items() if math.isfinite(value)}
