# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from outside and for outside: dense ones, and public names of the parameters."""

from megatron_residuals.interchange.initial import by_layer, initial_parameters, shaped_for
from megatron_residuals.interchange.names import ModelShape, is_residual_key
from megatron_residuals.interchange.public_file import read_residual, write_residual
from megatron_residuals.interchange.stored import open_checkpoint

__all__ = [
    "ModelShape",
    "by_layer",
    "initial_parameters",
    "is_residual_key",
    "open_checkpoint",
    "read_residual",
    "shaped_for",
    "write_residual",
]
