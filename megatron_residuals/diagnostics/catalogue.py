# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The metrics of every mechanism, and those of one: its own are in its entry.

Standard library only.
"""

from __future__ import annotations

from megatron_residuals.diagnostics.metric import Metric
from megatron_residuals.mechanisms import mechanism_in_file

COMMON = "residual"

OF_SIGNALS: tuple[Metric, ...] = (
    Metric(
        "hidden_rms",
        "reader",
        "max",
        "RMS of what a sublayer reads (in front of its norm); last, of what the final norm gets",
        advice="compare with the baseline's curve: a steady rise over depth is dilution, later "
        "sublayers count for less",
    ),
    Metric(
        "output_rms",
        "sublayer",
        "max",
        "RMS of what a sublayer returns, before it is written to the residual",
        advice="outputs that rise with depth make up for a growing hidden state (dilution)",
    ),
    Metric(
        "gradient_rms",
        "sublayer",
        "max",
        "RMS of the loss gradient at a sublayer's output, loss scale divided out",
        advice="a fall or rise by orders of magnitude over depth: compare with the baseline; with "
        "mHC look at gain_backward and column_error",
    ),
)

OF_THE_RUN: tuple[Metric, ...] = (
    Metric(
        "bytes_forward",
        "hop",
        "sum",
        "payload bytes that crossed a hop forwards in the step, all ranks together",
        advice="more than `megatron-residuals plan` says: check --residual-transport",
        per="step",
    ),
    Metric(
        "bytes_backward",
        "hop",
        "sum",
        "payload bytes that crossed a hop backwards in the step, all ranks together",
        advice="as bytes_forward",
        per="step",
    ),
    Metric(
        "cache_bytes",
        "rank",
        "max",
        "most bytes of sources that a pipeline rank held for its later stages in the step",
        advice="compare with `megatron-residuals plan`; smaller micro-batch groups hold fewer",
        per="step",
    ),
    Metric(
        "kept_bytes",
        "stage",
        "max",
        "bytes kept for backward by a stage's forward of one micro-batch (on a GPU the growth of "
        "allocated memory, on the CPU what autograd saved)",
        advice="compare with `megatron-residuals memory`; choose a --residual-recompute policy",
        per="step",
    ),
    Metric(
        "parameters_added",
        "run",
        "sum",
        "parameters that the mechanism adds to the model",
        per="step",
    ),
)


def metrics_of(mechanism: str) -> dict[str, Metric]:
    """The metrics of a mechanism by full name: ``residual/…`` of all, ``<prefix>/…`` of its own.

    Of a mechanism that is not installed here, those that all have.
    """
    try:
        entry = mechanism_in_file(mechanism)
        own = {f"{entry.prefix}/{metric.name}": metric for metric in entry.metrics}
    except ValueError:
        own = {}
    return {
        **{f"{COMMON}/{metric.name}": metric for metric in OF_SIGNALS},
        **own,
        **{f"{COMMON}/{metric.name}": metric for metric in OF_THE_RUN},
    }
