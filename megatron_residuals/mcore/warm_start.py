# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Public: training that starts from a plain model (``training/warm_start.py``)."""

from megatron_residuals.mcore.training.warm_start import start_from_plain

__all__ = ["start_from_plain"]
