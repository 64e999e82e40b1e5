# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Public: the record of a residual in checkpoints (``training/checkpoint.py``)."""

from megatron_residuals.mcore.training.checkpoint import convert_block_length, read_settings

__all__ = ["convert_block_length", "read_settings"]
