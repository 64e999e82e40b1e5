# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""HC, mHC and their kin in an exported model: ``functional.streams``, with names as trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from megatron_residuals.functional.precision import wide_dtype
from megatron_residuals.functional.streams import (
    HC_NORM_EPS,
    PAPER_EPS,
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamUpdate,
    contract_streams,
    expand_streams,
    hc_coefficients,
    mhc_coefficients,
    mhc_head_weights,
    read_streams,
    write_streams,
)

Settings = Mapping[str, str | int | float | bool]

MECHANISMS = ("hc", "mhc", "ihc", "single_pass_mhc")
OPTIONS = (
    "streams",
    "contraction",
    "hc_dynamic",
    "hc_norm",
    "mhc_convention",
    "mhc_mixing",
    "mhc_sinkhorn_iterations",
    "mhc_eps",
    "ihc_gate_eps",
)

State: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Streams [..., n, d]; with single-pass mHC the weights [..., n] of the next read beside them."""


def is_single_pass(settings: Settings) -> bool:
    """Whether a sublayer says how the next one reads."""
    return settings["mechanism"] == "single_pass_mhc"


def open_state(embedding: Tensor, settings: Settings) -> State:
    """n copies of the embedding [..., d] -> [..., n, d]."""
    streams = expand_streams(embedding, int(settings["streams"]))
    if not is_single_pass(settings):
        return streams
    reads = embedding.new_zeros(streams.shape[:-1], dtype=wide_dtype(embedding))
    reads[..., 0] = 1.0
    return streams, reads


def gates_of(settings: Settings) -> MhcOptions:
    """How mHC and its kin get to coefficients."""
    eps = float(settings["mhc_eps"])
    if settings["mechanism"] == "ihc":
        return MhcOptions("identity", 0, eps, float(settings["ihc_gate_eps"]))
    mixing = str(settings.get("mhc_mixing", "sinkhorn"))
    convention = str(settings["mhc_convention"]) if mixing == "sinkhorn" else mixing
    return MhcOptions(convention, int(settings["mhc_sinkhorn_iterations"]), eps)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32))


class Sublayer(nn.Module):
    """One sublayer over n streams: streams' = h_res streams + h_post F(h_pre streams)."""

    mapping_weight: nn.Parameter | None

    def __init__(self, settings: Settings, hidden_size: int, sublayer: int) -> None:
        super().__init__()
        self.settings, n = settings, int(settings["streams"])
        self.gates = None if settings["mechanism"] == "hc" else gates_of(settings)
        if self.gates is not None:
            columns = sum(self.gates.sizes(n))
            self.mapping_weight = _parameter(columns, n * hidden_size)
            self.bias = _parameter(columns)
            self.alpha_pre, self.alpha_post = _parameter(1), _parameter(1)
            self.alpha_res = _parameter(1) if self.gates.mixes else None
            return
        self.static_pre, self.static_post = _parameter(n), _parameter(n)
        self.static_res = _parameter(n * n)
        dynamic = bool(settings["hc_dynamic"])
        self.mapping_weight = _parameter(n + 2, hidden_size) if dynamic else None
        self.scale = _parameter(2) if dynamic else None

    def coefficients(self, streams: Tensor) -> StreamCoefficients:
        """h_pre, h_post [..., n] and h_res [..., n, n] or None, float32."""
        if self.gates is None:
            return self._hc(streams)
        assert self.mapping_weight is not None
        alphas = (self.alpha_pre, self.alpha_post, self.alpha_res)
        alpha = torch.cat([each for each in alphas if each is not None])
        weights = MhcWeights(self.mapping_weight, self.bias, alpha)
        return mhc_coefficients(streams, weights, self.gates)

    def _hc(self, streams: Tensor) -> StreamCoefficients:
        n = len(self.static_pre)
        static = StreamCoefficients(self.static_pre, self.static_post, self.static_res.view(n, n))
        norm = str(self.settings["hc_norm"])
        return hc_coefficients(
            streams, static, self.mapping_weight, self.scale, norm=norm, eps=HC_NORM_EPS
        )

    def forward(self, state: State, compute: Callable[[Tensor], Tensor]) -> State:
        """The state behind the sublayer; ``compute`` is F with its norm in front."""
        streams, reads = (state, None) if isinstance(state, Tensor) else state
        h_pre, h_post, h_res = self.coefficients(streams)
        output = compute(read_streams(streams, h_pre if reads is None else reads))
        written = write_streams(StreamUpdate(streams, output, h_post, h_res))
        return written if reads is None else (written, h_pre)


class Head(nn.Module):
    """The contraction of the streams in front of the final norm."""

    def __init__(self, settings: Settings, hidden_size: int) -> None:
        super().__init__()
        self.contraction, n = str(settings.get("contraction")), int(settings["streams"])
        self.eps = float(settings.get("mhc_eps", PAPER_EPS))
        gate_eps = settings.get("ihc_gate_eps")
        self.gate_eps = None if gate_eps is None else float(gate_eps)
        if self.contraction == "learned":
            self.head_weight = _parameter(n, n * hidden_size)
            self.head_bias, self.head_scale = _parameter(n), _parameter(1)

    def forward(self, state: State) -> Tensor:
        """[..., n, d] -> [..., d]; in single-pass mHC with the last sublayer's weights."""
        if not isinstance(state, Tensor):
            return read_streams(*state)
        weights = None
        if self.contraction == "learned":
            weights = mhc_head_weights(
                state,
                self.head_weight,
                self.head_bias,
                self.head_scale,
                eps=self.eps,
                gate_eps=self.gate_eps,
            )
        return contract_streams(state, self.contraction, weights)
