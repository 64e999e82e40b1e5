# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Residual mechanisms as modules, and the factories that build them from a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.functional import expand_streams
from megatron_residuals.modules.base import ResidualHead, SublayerResidual
from megatron_residuals.modules.depth_attention import DepthAttention, DepthHead
from megatron_residuals.modules.hyper_connection import (
    HyperConnection,
    ManifoldHyperConnection,
    StreamHead,
)
from megatron_residuals.modules.plain import PlainHead, PlainResidual
from megatron_residuals.modules.state import PlainState, ResidualState, SourceState, StreamState

__all__ = [
    "PlainState",
    "ResidualHead",
    "ResidualState",
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
    if config.mechanism == "residual":
        return PlainResidual()
    if depth is not None:
        return DepthAttention(
            hidden_size,
            opens_block=depth.opens_block(sublayer),
            eps=config.attnres_eps,
            kernels=config.kernels,
            device=device,
        )
    home_stream = sublayer % config.streams
    if config.mechanism == "hc":
        return HyperConnection(
            hidden_size,
            num_streams=config.streams,
            home_stream=home_stream,
            dynamic=config.hc_dynamic,
            norm=config.hc_norm,
            kernels=config.kernels,
            device=device,
        )
    return ManifoldHyperConnection(
        hidden_size,
        num_streams=config.streams,
        home_stream=home_stream,
        convention=config.mhc_convention,
        iterations=config.mhc_sinkhorn_iterations,
        eps=config.resolved_mhc_eps,
        alpha_init=config.mhc_alpha_init,
        initialisation=config.mhc_init,
        kernels=config.kernels,
        device=device,
    )


def build_head(
    config: ResidualConfig, *, hidden_size: int, device: torch.device | None = None
) -> ResidualHead[Any]:
    """The mechanism's module in front of the final norm."""
    if config.mechanism == "residual":
        return PlainHead()
    if config.is_sources:
        return DepthHead(hidden_size, eps=config.attnres_eps, kernels=config.kernels, device=device)
    return StreamHead(
        hidden_size,
        num_streams=config.streams,
        contraction=config.resolved_contraction,
        eps=config.resolved_mhc_eps,
        device=device,
    )


def open_state(config: ResidualConfig, embedding: Tensor) -> ResidualState:
    """The state before the first sublayer, from the embedding [..., d]."""
    if config.is_sources:
        return SourceState((), embedding)
    if config.is_streams:
        return StreamState(expand_streams(embedding, config.streams))
    return PlainState(embedding)
