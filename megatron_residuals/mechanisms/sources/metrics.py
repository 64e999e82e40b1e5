# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What is recorded of AttnRes, its healthy range, and what to do outside it."""

from __future__ import annotations

from megatron_residuals.diagnostics.metric import Metric

SOURCES: tuple[Metric, ...] = (
    Metric(
        "weights",
        "reader",
        "max",
        "alpha: mean attention weight of every source (0 is the embedding, n is block n; the "
        "block being summed is the last one read)",
        columns="source",
    ),
    Metric(
        "entropy",
        "reader",
        "mean",
        "entropy of alpha over ln(sources): 1 reads all equally, 0 only one",
        low=0.1,
        high=1.0,
        advice="depth attention has collapsed onto one source: lower learning rate for queries; "
        "see peak and query_norm",
        per="token",
    ),
    Metric(
        "peak",
        "reader",
        "mean",
        "largest weight of a token's read, averaged over tokens",
        high=0.95,
        advice="as entropy",
        per="token",
    ),
    Metric(
        "embedding_mass",
        "reader",
        "mean",
        "weight on source 0, the embedding",
        high=0.8,
        advice="blocks are ignored: queries and key gains must be without weight decay; see "
        "query_norm",
    ),
    Metric(
        "open_mass",
        "reader",
        "mean",
        "weight on the running sum of the open block",
        high=0.95,
        advice="only the current block is read, so that blocks are cut off from each other",
    ),
    Metric(
        "query_norm",
        "reader",
        "max",
        "L2 norm of the query; it starts at 0",
        high=50.0,
        advice="logits grow without bound and alpha becomes one-hot: lower learning rate",
        per="step",
    ),
    Metric(
        "key_gain_rms",
        "reader",
        "mean",
        "RMS of the key gain; it starts at 1",
        low=0.2,
        high=5.0,
        advice="falls under weight decay: queries and gains belong in a group without it",
        per="step",
    ),
)
