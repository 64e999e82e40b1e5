# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plain-PyTorch implementation of streams; ``triton.streams`` has the same names."""

from megatron_residuals.kernels.planes import read, update_and_read, write
from megatron_residuals.kernels.planes_backward import (
    read_backward,
    update_and_read_backward,
    write_backward,
)

__all__ = [
    "read",
    "read_backward",
    "update_and_read",
    "update_and_read_backward",
    "write",
    "write_backward",
]
