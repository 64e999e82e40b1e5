# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which sources each sublayer attends to, averaged over tokens."""

from __future__ import annotations

from typing import Any

import torch

from megatron_residuals.functional import depth_weights
from megatron_residuals.modules.depth_attention import DepthQuery


class DepthWeightRecorder:
    """Mean attention weight of every reader and source, over the evaluation passes seen.

    Readers are global sublayer indices, with one more for the final read. Recording happens in
    evaluation only, so that training runs at full speed and nothing is recorded twice where a
    forward pass is replayed.
    """

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        self._passes: dict[int, int] = {}

    def watch(self, module: torch.nn.Module | None, reader: int) -> None:
        """Record a reader; modules that do not read depth sources are ignored."""
        if not isinstance(module, DepthQuery):
            return

        def record(query: DepthQuery, inputs: tuple[Any, ...], _: Any) -> None:
            # a call without a state asks for the parameters of a read in two phases
            if inputs[0] is not None and not query.training:
                self._record(reader, query, inputs[0])

        module.register_forward_hook(record)

    @torch.no_grad()
    def _record(self, reader: int, query: DepthQuery, state: Any) -> None:
        weights = depth_weights(state.readable, query.query, query.key_gain, eps=query.eps)
        mean = weights.flatten(1).mean(1)
        self._sums[reader] = self._sums[reader] + mean if reader in self._sums else mean
        self._passes[reader] = self._passes.get(reader, 0) + 1

    def means(self) -> dict[int, list[float]]:
        """Mean weights [m] by reader, source 0 (the embedding) first; rows sum to one."""
        return {
            reader: (total / self._passes[reader]).tolist() for reader, total in self._sums.items()
        }
