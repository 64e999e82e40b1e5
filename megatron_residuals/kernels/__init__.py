# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The mathematics of ``functional`` as it is trained: same names and signatures, lean autograd.

What autograd keeps for backward is references to tensors that exist anyway (streams, sources, the
output of a sublayer) and a few float32 numbers per token; the rest is worked out again.

One folder for each file of ``functional``, and in each of them

    __init__    the functions: which backend, then autograd
    autograd    forward and backward as steps of autograd, once for all backends
    contract    what a backend is: for each function X it computes, X and X_backward on rows of
                tokens, without autograd
    pytorch     a backend: plain PyTorch, chunk by chunk
    triton/     a backend: operators (custom, for compilers) over launches over kernels
    liger, libraries    functions of other packages, which bring an autograd of their own

``common`` is what the folders share.
"""

from megatron_residuals.kernels.common.gradient_buffer import (
    GradientBuffer,
    buffered,
    depositing,
)
from megatron_residuals.kernels.depth_attention import (
    merge_running,
    read_by_heads,
    read_closed,
    read_sources,
)
from megatron_residuals.kernels.streams import (
    hc_coefficients,
    mhc_coefficients,
    mhc_head_weights,
    read_streams,
    update_and_read,
    write_streams,
)

__all__ = [
    "GradientBuffer",
    "buffered",
    "depositing",
    "hc_coefficients",
    "merge_running",
    "mhc_coefficients",
    "mhc_head_weights",
    "read_by_heads",
    "read_closed",
    "read_sources",
    "read_streams",
    "update_and_read",
    "write_streams",
]
