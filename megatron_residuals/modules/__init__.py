# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The verbs of a residual mechanism and the states they pass on; building both from a config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms import Place
from megatron_residuals.modules.base import ResidualHead, SublayerResidual
from megatron_residuals.modules.state import (
    PlainState,
    ResidualState,
    RowState,
    SourceState,
    StreamState,
)

__all__ = [
    "PlainState",
    "ResidualHead",
    "ResidualState",
    "RowState",
    "SourceState",
    "StreamState",
    "SublayerResidual",
    "build_head",
    "build_sublayer_residual",
    "open_state",
]


def build_sublayer_residual(
    config: ResidualConfig,
    depth: DepthMap | None,
    *,
    hidden_size: int,
    sublayer: int,
    device: torch.device | None = None,
) -> SublayerResidual[Any, Any]:
    """The mechanism's module for the sublayer with the given global index (0 = first attention).

    ``depth`` is ``config.depth_map(num_layers)``; only mechanisms with depth sources need it.
    """
    return config.entry.build_sublayer(config, Place(hidden_size, sublayer, depth, device))


def build_head(
    config: ResidualConfig,
    depth: DepthMap | None = None,
    *,
    hidden_size: int,
    device: torch.device | None = None,
) -> ResidualHead[Any]:
    """The mechanism's module in front of the final norm."""
    sublayer = 0 if depth is None else depth.num_sublayers
    return config.entry.build_head(config, Place(hidden_size, sublayer, depth, device))


def open_state(config: ResidualConfig, embedding: Tensor) -> ResidualState:
    """The state before the first sublayer, from the embedding [..., d]."""
    return config.entry.open(config, embedding)
