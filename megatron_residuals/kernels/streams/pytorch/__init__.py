# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The backend in plain PyTorch, a few tokens at a time so that they stay in the cache."""

from megatron_residuals.kernels.streams.pytorch.passes import (
    read_streams,
    read_streams_backward,
    update_and_read,
    update_and_read_backward,
    write_streams,
    write_streams_backward,
)

__all__ = [
    "read_streams",
    "read_streams_backward",
    "update_and_read",
    "update_and_read_backward",
    "write_streams",
    "write_streams_backward",
]
