# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Residual mathematics as pure functions: the reference and the specification.

Every function takes leading dimensions as ``...``, runs on CPU in float64, and computes in at least
float32 whatever the dtype of the activations.
"""

from megatron_residuals.functional.depth_attention import (
    ClosedRead,
    depth_weights,
    head_weights,
    merge_running,
    read_by_heads,
    read_closed,
    read_sources,
)
from megatron_residuals.functional.sinkhorn import sinkhorn_dsv4, sinkhorn_paper
from megatron_residuals.functional.streams import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamRead,
    StreamUpdate,
    contract_streams,
    expand_streams,
    hc_coefficients,
    mhc_coefficients,
    mhc_head_weights,
    read_streams,
    update_and_read,
    write_streams,
)

__all__ = [
    "ClosedRead",
    "MhcOptions",
    "MhcWeights",
    "StreamCoefficients",
    "StreamRead",
    "StreamUpdate",
    "contract_streams",
    "depth_weights",
    "expand_streams",
    "hc_coefficients",
    "head_weights",
    "merge_running",
    "mhc_coefficients",
    "mhc_head_weights",
    "read_by_heads",
    "read_closed",
    "read_sources",
    "read_streams",
    "sinkhorn_dsv4",
    "sinkhorn_paper",
    "update_and_read",
    "write_streams",
]
