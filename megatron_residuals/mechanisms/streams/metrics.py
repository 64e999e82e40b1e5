# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What is recorded of HC, mHC and iHC, its healthy range, and what to do outside it."""

from __future__ import annotations

from megatron_residuals.diagnostics.metric import Metric

_GROWTH = (
    "signals grow with depth: lower the learning rate, and with HC use mHC, whose mixing cannot "
    "amplify"
)

MIXING: tuple[Metric, ...] = (
    Metric(
        "gain_forward",
        "sublayer",
        "max",
        "largest absolute row sum of one H_res (Amax gain), averaged over tokens",
        low=0.9,
        high=1.1,
        advice=_GROWTH,
        per="token",
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
        per="token",
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
    ),
    Metric(
        "diagonal",
        "sublayer",
        "min",
        "mean diagonal of H_res: 1 keeps the streams apart, 1/n averages them",
        low=0.3,
        advice="streams are averaged in every sublayer and become copies; see stream_cosine",
        per="token",
    ),
    Metric(
        "mixing",
        "sublayer",
        "max",
        "mean H_res, row by row: what each new stream takes of each old one (of the tokens of "
        "composite_forward)",
        columns="stream pair",
        advice="near the identity, streams stay apart; near 1/n everywhere, they are averaged",
    ),
)

STREAMS: tuple[Metric, ...] = (
    Metric(
        "pre_mean",
        "sublayer",
        "mean",
        "mean read coefficient (h_pre)",
        low=0.02,
        high=1.0,
        advice="a sublayer that reads nothing is switched off",
    ),
    Metric(
        "post_mean",
        "sublayer",
        "mean",
        "mean write coefficient (h_post); 1 writes as the plain residual does",
        low=0.2,
        high=1.8,
        advice="writes fade out, or sit at the upper end of the gate",
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
        per="token",
    ),
    Metric(
        "stream_rms",
        "sublayer",
        "max",
        "RMS of every stream in front of a sublayer",
        columns="stream",
        advice="one stream far above the others carries everything: the others are unused",
    ),
    Metric(
        "read_weights",
        "sublayer",
        "max",
        "h_pre by stream: which streams a sublayer reads",
        columns="stream",
        per="token",
    ),
    Metric(
        "write_weights",
        "sublayer",
        "max",
        "h_post by stream: which streams a sublayer writes to",
        columns="stream",
        per="token",
    ),
)

GATES: tuple[Metric, ...] = (
    Metric(
        "pre_saturated",
        "sublayer",
        "max",
        "share of read gates within 1 % of the ends of their sigmoid",
        high=0.5,
        advice="saturated gates have no gradient: lower learning rate for gates and projections",
        per="token",
    ),
    Metric(
        "post_saturated",
        "sublayer",
        "max",
        "share of write gates within 1 % of the ends of their sigmoid",
        high=0.5,
        advice="as pre_saturated",
        per="token",
    ),
    Metric(
        "alpha_pre",
        "sublayer",
        "mean",
        "gating factor of the read coefficients",
        low=-5.0,
        high=5.0,
        advice="large factors make coefficients jump from token to token: see *_saturated",
        per="step",
    ),
    Metric(
        "alpha_post",
        "sublayer",
        "mean",
        "gating factor of the write coefficients",
        low=-5.0,
        high=5.0,
        advice="as alpha_pre",
        per="step",
    ),
)

OF_MHC: tuple[Metric, ...] = (
    Metric(
        "row_error",
        "sublayer",
        "max",
        "largest |row sum - 1| of H_res, averaged over tokens",
        high=1e-3,
        advice="rows are normalised last (paper) or first (dsv4): with dsv4 more iterations",
        per="token",
    ),
    Metric(
        "column_error",
        "sublayer",
        "max",
        "largest |column sum - 1| of H_res, averaged over tokens",
        high=0.1,
        advice="Sinkhorn does not converge on such extreme logits: more iterations, lower "
        "learning rate for the mechanism",
        per="token",
    ),
    Metric(
        "alpha_res",
        "sublayer",
        "mean",
        "gating factor of the mixing logits",
        low=-5.0,
        high=5.0,
        advice="as alpha_pre; see column_error",
        per="step",
    ),
)

OF_HC: tuple[Metric, ...] = (
    Metric(
        "scale_alpha",
        "sublayer",
        "mean",
        "s_alpha: weight of the dynamic part of reading and mixing",
        low=-1.0,
        high=1.0,
        advice="the mixing is no longer near its static part: watch composite_forward",
        per="step",
    ),
    Metric(
        "scale_beta",
        "sublayer",
        "mean",
        "s_beta: weight of the dynamic part of writing",
        low=-1.0,
        high=1.0,
        advice="as scale_alpha",
        per="step",
    ),
)
