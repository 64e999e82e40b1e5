# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What is taken from one read of a mechanism, and the sums that a visit of a stage makes of it.

A probe looks at every read as it happens and keeps small tensors of sampled tokens; when the stage
is done they are stacked over its sublayers, so that the arithmetic is a few operations per visit.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.diagnostics import statistics
from megatron_residuals.diagnostics.tokens import sample_tokens
from megatron_residuals.mechanisms.sources import Sources
from megatron_residuals.mechanisms.sources.module import DepthQuery
from megatron_residuals.mechanisms.streams import Streams
from megatron_residuals.mechanisms.streams.module import HyperConnection, ManifoldHyperConnection
from megatron_residuals.modules import SourceState

Looked = dict[str, Tensor]


class Probe(Protocol):
    """How one mechanism is looked at."""

    def look(self, module: Any, state: Any, pending: Any) -> Looked:
        """Small tensors of one read, first dim tokens; pending is None at the head."""

    def sums(self, looked: Looked) -> Looked:
        """Sums over tokens by field, from what was looked at, stacked [sublayers, tokens, ...]."""

    def parameters(self, module: Any) -> Looked:
        """Figures of a module's parameters by field, one row each."""


class PlainProbe:
    """The plain residual has nothing of its own to look at."""

    def look(self, module: Any, state: Any, pending: Any) -> Looked:
        """Nothing."""
        return {}

    def sums(self, looked: Looked) -> Looked:
        """Nothing."""
        return {}

    def parameters(self, module: Any) -> Looked:
        """Nothing."""
        return {}


class StreamProbe:
    """HC and mHC: coefficients, and norms and inner products of the streams."""

    def __init__(self, *, sigmoids: bool) -> None:
        self._sigmoids = sigmoids

    def look(self, module: Any, state: Any, pending: Any) -> Looked:
        """pre, post [S, n], res [S, n, n], gram [S, n, n] of the streams over their width."""
        if pending is None:
            return {}
        streams = sample_tokens(pending.streams, 2)
        return {
            "pre": sample_tokens(pending.h_pre, 1).clone(),
            "post": sample_tokens(pending.h_post, 1).clone(),
            "res": sample_tokens(pending.h_res, 2).clone(),
            "gram": torch.matmul(streams, streams.mT) / streams.shape[-1],
        }

    def sums(self, looked: Looked) -> Looked:
        """Every field of streams but the parameters and the matrices."""
        pre, post, res, gram = (looked[name] for name in ("pre", "post", "res", "gram"))
        found = {
            "gain_forward": statistics.row_gain(res),
            "gain_backward": statistics.column_gain(res),
            "row_error": statistics.row_error(res),
            "column_error": statistics.column_error(res),
            "diagonal": statistics.mean_diagonal(res),
            "read_weights": pre,
            "write_weights": post,
            "stream_square": gram.diagonal(dim1=-2, dim2=-1),
            "stream_cosine": statistics.mean_cosine(gram),
        }
        if self._sigmoids:
            found["pre_saturated"] = statistics.saturated_share(pre)
            found["post_saturated"] = statistics.saturated_share(post / 2)
        return {name: values.sum(1) for name, values in found.items()}

    def parameters(self, module: Any) -> Looked:
        """gates: alpha_pre, alpha_post, alpha_res of mHC; s_alpha, s_beta, 0 of HC."""
        if isinstance(module, ManifoldHyperConnection):
            gates = (module.alpha_pre, module.alpha_post, module.alpha_res)
            return {"gates": torch.cat([gate.detach() for gate in gates])}
        if isinstance(module, HyperConnection) and module.scale is not None:
            return {"gates": torch.nn.functional.pad(module.scale.detach(), (0, 1))}
        return {}


class SourceProbe:
    """Full and Block AttnRes: the attention weights over sources."""

    def __init__(self, max_sources: int) -> None:
        self._max_sources = max_sources

    def look(self, module: Any, state: SourceState, pending: SourceState | None) -> Looked:
        """weights [S, max_sources], padded with 0; entropy [S]."""
        read = (state if pending is None else pending).readable
        sources = torch.stack([sample_tokens(source, 1) for source in read], dim=1)  # [S, m, d]
        inverse_rms = torch.rsqrt(sources.square().mean(-1) + module.eps)
        direction = (module.query * module.key_gain).detach().to(sources.dtype)
        weights = torch.softmax(inverse_rms * (sources @ direction), dim=-1)
        padding = (0, self._max_sources - weights.shape[-1])
        return {
            "weights": torch.nn.functional.pad(weights, padding),
            "entropy": statistics.relative_entropy(weights),
        }

    def sums(self, looked: Looked) -> Looked:
        """weights, entropy and the largest weight."""
        weights = looked["weights"]
        return {
            "weights": weights.sum(1),
            "entropy": looked["entropy"].sum(1),
            "peak": weights.amax(-1).sum(1),
        }

    def parameters(self, module: Any) -> Looked:
        """query_norm and key_gain_rms."""
        assert isinstance(module, DepthQuery)
        gain = torch.linalg.vector_norm(module.key_gain.detach())
        return {
            "query_norm": torch.linalg.vector_norm(module.query.detach()),
            "key_gain_rms": gain / math.sqrt(module.key_gain.numel()),
        }


def probe_for(residual: ResidualConfig, max_sources: int) -> Probe:
    """The probe of a mechanism; ``max_sources`` is what its last reader reads."""
    if isinstance(residual.entry, Streams):
        return StreamProbe(sigmoids=residual.mechanism == "mhc")
    if isinstance(residual.entry, Sources):
        return SourceProbe(max_sources)
    return PlainProbe()
