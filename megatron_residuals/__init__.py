# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Replace the residual connection of a Megatron-Core model: HC, mHC, Full and Block AttnRes.

Importing this package loads neither torch nor Megatron; the names below resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatron_residuals._version import __version__
from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.plan import StageLayout, TransferPlan

if TYPE_CHECKING:
    from megatron_residuals.specs import residual_spec

__all__ = [
    "DepthMap",
    "ResidualConfig",
    "StageLayout",
    "TransferPlan",
    "__version__",
    "residual_spec",
]


def __getattr__(name: str) -> object:
    if name == "residual_spec":
        return importlib.import_module("megatron_residuals.specs").residual_spec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
