# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plain residual connection in an exported model: the state is the hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

Settings = Mapping[str, str | int | float | bool]

MECHANISMS = ("residual",)
OPTIONS = ()


def open_state(embedding: Tensor, settings: Settings) -> Tensor:
    """The state in front of the first sublayer."""
    return embedding


class Sublayer(nn.Module):
    """One sublayer over the state: h' = h + F(h)."""

    def __init__(self, settings: Settings, hidden_size: int, sublayer: int) -> None:
        super().__init__()

    def forward(self, state: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The state behind the sublayer; ``compute`` is F with its norm in front."""
        return state + compute(state)


class Head(nn.Module):
    """The state in front of the final norm as one hidden state."""

    def __init__(self, settings: Settings, hidden_size: int) -> None:
        super().__init__()

    def forward(self, state: Tensor) -> Tensor:
        """The stream."""
        return state
