# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every metric: what it is counted over, how it is summarised, its healthy range, what to do.

Standard library only.
"""

from __future__ import annotations

from typing import Any

from megatron_residuals.config import SOURCE_MECHANISMS, STREAM_MECHANISMS
from megatron_residuals.diagnostics.metric import Metric

_STREAMS: dict[str, Any] = {"mechanisms": STREAM_MECHANISMS}
_SOURCES: dict[str, Any] = {"mechanisms": SOURCE_MECHANISMS}
_GROWTH = (
    "signals grow with depth: lower the learning rate, and with HC use mHC, whose mixing cannot "
    "amplify"
)

METRICS: tuple[Metric, ...] = (
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
    Metric(
        "gain_forward",
        "sublayer",
        "max",
        "largest absolute row sum of one H_res (Amax gain), averaged over tokens",
        low=0.9,
        high=1.1,
        advice=_GROWTH,
        **_STREAMS,
    ),
    Metric(
        "gain_backward",
        "sublayer",
        "max",
        "largest absolute column sum of one H_res, averaged over tokens",
        low=0.9,
        high=1.25,
        advice="mHC: more Sinkhorn iterations or a lower learning rate for the mechanism, since "
        "columns are not normalised last; HC: as gain_forward",
        **_STREAMS,
    ),
    Metric(
        "composite_forward",
        "sublayer",
        "max",
        "largest absolute row sum of the product of all H_res from the first sublayer through "
        "this one, across pipeline stages",
        low=0.5,
        high=2.0,
        advice=_GROWTH,
        **_STREAMS,
    ),
    Metric(
        "composite_backward",
        "sublayer",
        "max",
        "largest absolute column sum of the product of all H_res from this sublayer through the "
        "last, which is what a gradient is multiplied by on its way here",
        low=0.5,
        high=2.0,
        advice="as gain_backward; beyond ten, expect spikes of the gradient norm",
        **_STREAMS,
    ),
    Metric(
        "row_error",
        "sublayer",
        "max",
        "largest |row sum - 1| of H_res, averaged over tokens",
        high=1e-3,
        advice="rows are normalised last (paper) or first (dsv4): with dsv4 more iterations",
        mechanisms=("mhc",),
    ),
    Metric(
        "column_error",
        "sublayer",
        "max",
        "largest |column sum - 1| of H_res, averaged over tokens",
        high=0.1,
        advice="Sinkhorn does not converge on such extreme logits: more iterations, lower "
        "learning rate for the mechanism",
        mechanisms=("mhc",),
    ),
    Metric(
        "diagonal",
        "sublayer",
        "min",
        "mean diagonal of H_res: 1 keeps the streams apart, 1/n averages them",
        low=0.3,
        advice="streams are averaged in every sublayer and become copies; see stream_cosine",
        **_STREAMS,
    ),
    Metric(
        "pre_mean",
        "sublayer",
        "mean",
        "mean read coefficient (h_pre)",
        low=0.02,
        high=1.0,
        advice="a sublayer that reads nothing is switched off",
        **_STREAMS,
    ),
    Metric(
        "post_mean",
        "sublayer",
        "mean",
        "mean write coefficient (h_post); 1 writes as the plain residual does",
        low=0.2,
        high=1.8,
        advice="writes fade out, or sit at the upper end of the gate",
        **_STREAMS,
    ),
    Metric(
        "pre_saturated",
        "sublayer",
        "max",
        "share of read gates within 1 % of the ends of their sigmoid",
        high=0.5,
        advice="saturated gates have no gradient: lower learning rate for gates and projections",
        mechanisms=("mhc",),
    ),
    Metric(
        "post_saturated",
        "sublayer",
        "max",
        "share of write gates within 1 % of the ends of their sigmoid",
        high=0.5,
        advice="as pre_saturated",
        mechanisms=("mhc",),
    ),
    Metric(
        "alpha_pre",
        "sublayer",
        "mean",
        "gating factor of the read coefficients",
        mechanisms=("mhc",),
        low=-5.0,
        high=5.0,
        advice="large factors make coefficients jump from token to token: see *_saturated",
    ),
    Metric(
        "alpha_post",
        "sublayer",
        "mean",
        "gating factor of the write coefficients",
        mechanisms=("mhc",),
        low=-5.0,
        high=5.0,
        advice="as alpha_pre",
    ),
    Metric(
        "alpha_res",
        "sublayer",
        "mean",
        "gating factor of the mixing logits",
        mechanisms=("mhc",),
        low=-5.0,
        high=5.0,
        advice="as alpha_pre; see column_error",
    ),
    Metric(
        "scale_alpha",
        "sublayer",
        "mean",
        "s_alpha: weight of the dynamic part of reading and mixing",
        mechanisms=("hc",),
        low=-1.0,
        high=1.0,
        advice="the mixing is no longer near its static part: watch composite_forward",
    ),
    Metric(
        "scale_beta",
        "sublayer",
        "mean",
        "s_beta: weight of the dynamic part of writing",
        mechanisms=("hc",),
        low=-1.0,
        high=1.0,
        advice="as scale_alpha",
    ),
    Metric(
        "stream_cosine",
        "sublayer",
        "mean",
        "mean cosine between two different streams in front of a sublayer",
        high=0.999,
        advice="the streams are copies: it does not matter which one is read. Expected in the "
        "first hundreds of steps; if it lasts, raise --residual-lr-mult (with symmetric initial "
        "values streams stay copies)",
        **_STREAMS,
    ),
    Metric(
        "stream_rms",
        "sublayer",
        "max",
        "RMS of every stream in front of a sublayer",
        columns="stream",
        advice="one stream far above the others carries everything: the others are unused",
        **_STREAMS,
    ),
    Metric(
        "read_weights",
        "sublayer",
        "max",
        "h_pre by stream: which streams a sublayer reads",
        columns="stream",
        **_STREAMS,
    ),
    Metric(
        "write_weights",
        "sublayer",
        "max",
        "h_post by stream: which streams a sublayer writes to",
        columns="stream",
        **_STREAMS,
    ),
    Metric(
        "mixing",
        "sublayer",
        "max",
        "mean H_res, row by row: what each new stream takes of each old one (of the tokens of "
        "composite_forward)",
        columns="stream pair",
        advice="near the identity, streams stay apart; near 1/n everywhere, they are averaged",
        **_STREAMS,
    ),
    Metric(
        "weights",
        "reader",
        "max",
        "alpha: mean attention weight of every source (0 is the embedding, n is block n; the "
        "block being summed is the last one read)",
        columns="source",
        **_SOURCES,
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
        **_SOURCES,
    ),
    Metric(
        "peak",
        "reader",
        "mean",
        "largest weight of a token's read, averaged over tokens",
        high=0.95,
        advice="as entropy",
        **_SOURCES,
    ),
    Metric(
        "embedding_mass",
        "reader",
        "mean",
        "weight on source 0, the embedding",
        high=0.8,
        advice="blocks are ignored: queries and key gains must be without weight decay; see "
        "query_norm",
        **_SOURCES,
    ),
    Metric(
        "open_mass",
        "reader",
        "mean",
        "weight on the running sum of the open block",
        high=0.95,
        advice="only the current block is read, so that blocks are cut off from each other",
        **_SOURCES,
    ),
    Metric(
        "query_norm",
        "reader",
        "max",
        "L2 norm of the query; it starts at 0",
        high=50.0,
        advice="logits grow without bound and alpha becomes one-hot: lower learning rate",
        **_SOURCES,
    ),
    Metric(
        "key_gain_rms",
        "reader",
        "mean",
        "RMS of the key gain; it starts at 1",
        low=0.2,
        high=5.0,
        advice="falls under weight decay: queries and gains belong in a group without it",
        **_SOURCES,
    ),
    Metric(
        "bytes_forward",
        "hop",
        "sum",
        "payload bytes that crossed a hop forwards in the step, all ranks together",
        advice="more than `megatron-residuals plan` says: check --residual-transport",
    ),
    Metric(
        "bytes_backward",
        "hop",
        "sum",
        "payload bytes that crossed a hop backwards in the step, all ranks together",
        advice="as bytes_forward",
    ),
    Metric(
        "cache_bytes",
        "rank",
        "max",
        "most bytes of sources that a pipeline rank held for its later stages in the step",
        advice="compare with `megatron-residuals plan`; smaller micro-batch groups hold fewer",
    ),
    Metric(
        "kept_bytes",
        "stage",
        "max",
        "bytes kept for backward by a stage's forward of one micro-batch (on a GPU the growth of "
        "allocated memory, on the CPU what autograd saved)",
        advice="compare with `megatron-residuals memory`; choose a --residual-recompute policy",
    ),
    Metric(
        "parameters_added",
        "run",
        "sum",
        "parameters that the mechanism adds to the model",
    ),
)


def metrics_of(mechanism: str) -> dict[str, Metric]:
    """The metrics of a mechanism by full name, in the order of the catalogue."""
    return {
        metric.full_name(mechanism): metric for metric in METRICS if mechanism in metric.mechanisms
    }
