# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Public: parameter groups of the mechanism (``training/optimizer.py``)."""

from megatron_residuals.mcore.training.optimizer import residual_overrides

__all__ = ["residual_overrides"]
