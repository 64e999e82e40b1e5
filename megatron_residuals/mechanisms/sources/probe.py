# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Full and Block AttnRes, looked at while they run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.diagnostics import statistics
from megatron_residuals.diagnostics.probes import Looked, Probe, View
from megatron_residuals.diagnostics.tokens import sample_tokens
from megatron_residuals.mechanisms.sources.module import DepthQuery
from megatron_residuals.modules import SourceState


class SourceProbe(Probe):
    """The attention weights over sources."""

    @property
    def max_sources(self) -> int:
        """What the last reader reads."""
        assert self.depth is not None, "the state has depth sources"
        return self.depth.num_read(self.depth.num_sublayers)

    def shapes(self, num_sublayers: int) -> dict[str, tuple[int, ...]]:
        """Also the weights themselves."""
        return {
            **super().shapes(num_sublayers),
            "weights": (num_sublayers + 1, self.max_sources),
        }

    def look(self, module: Any, state: SourceState, pending: SourceState | None) -> Looked:
        """weights [S, max_sources], means over heads, padded with 0; their entropy [S]."""
        read = (state if pending is None else pending).readable
        sources = torch.stack([sample_tokens(source, 1) for source in read], dim=1)  # [S, m, d]
        rstd = torch.rsqrt(sources.square().mean(-1, keepdim=True) + module.eps)
        direction = (module.query * module.key_gain).detach().to(sources.dtype)
        slices = (sources * direction).unflatten(-1, (module.heads, -1))
        weights = torch.softmax(rstd * slices.sum(-1), dim=1).mean(-1)
        padding = (0, self.max_sources - weights.shape[-1])
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

    def figures(self, total: View, per_token: View) -> Iterator[tuple[str, Tensor]]:
        """Also the weights and what lies on the two ends of them."""
        assert self.depth is not None, "the state has depth sources"
        yield from super().figures(total, per_token)
        weights = per_token("weights")
        num_read = [self.depth.num_read(i) for i in range(len(weights))]
        yield "embedding_mass", weights[:, 0].clone()
        open_mass = [row[m - 1] for row, m in zip(weights, num_read, strict=True)]
        yield "open_mass", torch.stack(open_mass)
        for row, m in zip(weights, num_read, strict=True):
            row[m:] = math.nan
        yield "weights", weights
