# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Full and Block AttnRes in an exported model: a tuple of sources, the running sum last."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megatron_residuals.functional.depth_attention import read_by_heads, read_sources

Settings = Mapping[str, str | int | float | bool]

MECHANISMS = ("attnres", "block_attnres")
OPTIONS = (
    "attnres_eps",
    "attnres_heads",
    "attnres_additive",
    "block_layers",
    "block_sublayers",
)


def open_state(embedding: Tensor, settings: Settings) -> tuple[Tensor, ...]:
    """The embedding is the running sum in front of the first block."""
    return (embedding,)


class _Query(nn.Module):
    """A query and a gain of the keys, [d] each."""

    def __init__(self, settings: Settings, hidden_size: int) -> None:
        super().__init__()
        self.eps = float(settings["attnres_eps"])
        self.heads = int(settings.get("attnres_heads", 1))
        self.additive = bool(settings.get("attnres_additive", False))
        self.query = nn.Parameter(torch.zeros(hidden_size, dtype=torch.float32))
        self.key_gain = nn.Parameter(torch.ones(hidden_size, dtype=torch.float32))

    def read(self, sources: tuple[Tensor, ...]) -> Tensor:
        """Attention over the sources [..., d] -> [..., d]."""
        if self.heads == 1 and not self.additive:
            return read_sources(sources, self.query, self.key_gain, eps=self.eps)
        heads, additive = self.heads, self.additive
        return read_by_heads(
            sources, self.query, self.key_gain, eps=self.eps, heads=heads, additive=additive
        )


class Sublayer(_Query):
    """One sublayer: reads all sources, adds its output to the running sum or starts the next."""

    def __init__(self, settings: Settings, hidden_size: int, sublayer: int) -> None:
        super().__init__(settings, hidden_size)
        self.opens_block = sublayer % int(settings["block_sublayers"]) == 0

    def forward(
        self, sources: tuple[Tensor, ...], compute: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """The sources behind the sublayer; ``compute`` is F with its norm in front."""
        output = compute(self.read(sources))
        if self.opens_block:
            return (*sources, output)
        return (*sources[:-1], sources[-1] + output)


class Head(_Query):
    """The final read, in front of the final norm."""

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        """Attention over all blocks."""
        return self.read(sources)
