# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What is taken from one read of a mechanism, and what a visit of a stage and a step make of it.

A probe looks at every read as it happens and keeps small tensors of sampled tokens; when the stage
is done they are stacked over its sublayers, so that the arithmetic is a few operations per visit.
Their sums over all ranks become figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms import Mechanism

Looked = dict[str, Tensor]
View = Callable[[str], Tensor]
"""The sum of a field, or that sum per token."""


class Probe:
    """How a mechanism is looked at; a mechanism without a probe of its own is looked at by this.

    What ``look`` or ``parameters`` return under a metric's name becomes that metric by itself.

    Args:
        entry: of the mechanism.
        config: its options.
        depth: of mechanisms with depth sources.
    """

    def __init__(self, entry: Mechanism, config: ResidualConfig, depth: DepthMap | None) -> None:
        self.metrics, self.config, self.depth = entry.metrics, config, depth

    def shapes(self, num_sublayers: int) -> dict[str, tuple[int, ...]]:
        """The fields that are summed, beside those of all mechanisms: one row for each place."""
        return {
            metric.name: (num_sublayers + (metric.axis == "reader"), *self.columns(metric.name))
            for metric in self.metrics
            if metric.per is not None
        }

    def columns(self, name: str) -> tuple[int, ...]:
        """The shape of one row of a metric with columns."""
        return ()

    def look(self, module: Any, state: Any, pending: Any) -> Looked:
        """Small tensors of one read, first dim tokens; pending is None at the head."""
        return {}

    def sums(self, looked: Looked) -> Looked:
        """Sums over tokens by field, from what was looked at, stacked [sublayers, tokens, ...]."""
        return {name: values.sum(1) for name, values in looked.items()}

    def parameters(self, module: Any) -> Looked:
        """Figures of a module's parameters by field, one row each."""
        return {}

    def whole(self, looked: Looked) -> Looked:
        """Fields of the step's first micro-batch on one replica, [sublayers, ...]."""
        return {}

    def figures(self, total: View, per_token: View) -> Iterator[tuple[str, Tensor]]:
        """Metrics by name from the sums over all ranks."""
        for metric in self.metrics:
            if metric.per is not None:
                yield metric.name, (per_token if metric.per == "token" else total)(metric.name)


def probe_for(config: ResidualConfig, depth: DepthMap | None) -> Probe:
    """The probe of a model's mechanism."""
    return config.entry.probe(config, depth) or Probe(config.entry, config, depth)
