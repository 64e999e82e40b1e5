# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""HC and mHC in an exported model: the equations of ``functional.streams``, names as trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

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

MECHANISMS = ("hc", "mhc")
OPTIONS = (
    "streams",
    "contraction",
    "hc_dynamic",
    "hc_norm",
    "mhc_convention",
    "mhc_sinkhorn_iterations",
    "mhc_eps",
)


def open_state(embedding: Tensor, settings: Settings) -> Tensor:
    """n copies of the embedding [..., d] -> [..., n, d]."""
    return expand_streams(embedding, int(settings["streams"]))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32))


class Sublayer(nn.Module):
    """One sublayer over n streams: streams' = h_res streams + h_post F(h_pre streams)."""

    mapping_weight: nn.Parameter | None

    def __init__(self, settings: Settings, hidden_size: int, sublayer: int) -> None:
        super().__init__()
        self.settings, n = settings, int(settings["streams"])
        self.is_mhc = settings["mechanism"] == "mhc"
        columns = 2 * n + n * n
        if self.is_mhc:
            self.mapping_weight = _parameter(columns, n * hidden_size)
            self.bias = _parameter(columns)
            self.alpha_pre, self.alpha_post = _parameter(1), _parameter(1)
            self.alpha_res = _parameter(1)
            return
        self.static_pre, self.static_post = _parameter(n), _parameter(n)
        self.static_res = _parameter(n * n)
        dynamic = bool(settings["hc_dynamic"])
        self.mapping_weight = _parameter(n + 2, hidden_size) if dynamic else None
        self.scale = _parameter(2) if dynamic else None

    def coefficients(self, streams: Tensor) -> StreamCoefficients:
        """h_pre, h_post [..., n] and h_res [..., n, n], float32."""
        return (self._mhc if self.is_mhc else self._hc)(streams)

    def _mhc(self, streams: Tensor) -> StreamCoefficients:
        assert self.mapping_weight is not None
        alpha = torch.cat((self.alpha_pre, self.alpha_post, self.alpha_res))
        options = MhcOptions(
            str(self.settings["mhc_convention"]),
            int(self.settings["mhc_sinkhorn_iterations"]),
            float(self.settings["mhc_eps"]),
        )
        return mhc_coefficients(streams, MhcWeights(self.mapping_weight, self.bias, alpha), options)

    def _hc(self, streams: Tensor) -> StreamCoefficients:
        n = len(self.static_pre)
        static = StreamCoefficients(self.static_pre, self.static_post, self.static_res.view(n, n))
        norm = str(self.settings["hc_norm"])
        return hc_coefficients(
            streams, static, self.mapping_weight, self.scale, norm=norm, eps=HC_NORM_EPS
        )

    def forward(self, streams: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams behind the sublayer; ``compute`` is F with its norm in front."""
        h_pre, h_post, h_res = self.coefficients(streams)
        output = compute(read_streams(streams, h_pre))
        return write_streams(StreamUpdate(streams, output, h_post, h_res))


class Head(nn.Module):
    """The contraction of the streams in front of the final norm."""

    def __init__(self, settings: Settings, hidden_size: int) -> None:
        super().__init__()
        self.contraction, n = str(settings["contraction"]), int(settings["streams"])
        self.eps = float(settings.get("mhc_eps", PAPER_EPS))
        if self.contraction == "learned":
            self.head_weight = _parameter(n, n * hidden_size)
            self.head_bias, self.head_scale = _parameter(n), _parameter(1)

    def forward(self, streams: Tensor) -> Tensor:
        """[..., n, d] -> [..., d]."""
        weights = None
        if self.contraction == "learned":
            weights = mhc_head_weights(
                streams, self.head_weight, self.head_bias, self.head_scale, eps=self.eps
            )
        return contract_streams(streams, self.contraction, weights)
