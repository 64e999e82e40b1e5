# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Public: the end of a step in a training loop of your own (``training/monitor.py``)."""

from megatron_residuals.mcore.training.monitor import log_step

__all__ = ["log_step"]
