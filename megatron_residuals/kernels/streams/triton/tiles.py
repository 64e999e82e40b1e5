# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How each kernel is cut, by the number of streams, the hidden size and the dtype alone.

Neither the number of tokens nor a measurement at run time has a say: the same numbers are added in
the same order in every run and for every batch.
"""

from __future__ import annotations

import torch

from megatron_residuals.kernels.common.triton import Tile, ceil_div

MAX_FUSED_STREAMS = 4  # more have too many coefficients to be projected or held beside the planes
COEFFICIENT_TOKENS, COEFFICIENT_WARPS = 64, 2
GROUP_STEPS = 32  # of a group of tokens, which has its own partial gradient of the mapping
SPLIT_CHANNELS = 1024  # of a program of write_and_mix

WRITE, WRITE_MANY = Tile(64, 32, 8), Tile(32, 32, 8)
MIX = Tile(64, 64, 8)
READ = Tile(4, 1024, 4)
PRODUCTS, PRODUCTS_MANY = Tile(4, 512, 4), Tile(2, 256, 4)
BACKWARD, BACKWARD_FEW, BACKWARD_MANY = Tile(16, 64, 4, 2), Tile(16, 64, 8, 2), Tile(16, 32, 4)


def write_tile(num_streams: int, hidden_size: int, *, updates: bool) -> Tile:
    """Of ``write_and_mix_kernel``; without an update there is less to hold."""
    if num_streams > MAX_FUSED_STREAMS:
        return WRITE_MANY.within(hidden_size)
    return (WRITE if updates else MIX).within(hidden_size)


def read_tile(hidden_size: int) -> Tile:
    """Of ``read_streams_kernel``."""
    return READ.within(hidden_size)


def products_tile(num_streams: int, hidden_size: int) -> Tile:
    """Of ``stream_products_kernel``: one sum for each stream stays in registers."""
    tile = PRODUCTS if num_streams <= MAX_FUSED_STREAMS else PRODUCTS_MANY
    return tile.within(hidden_size)


def backward_tile(num_streams: int, hidden_size: int, dtype: torch.dtype) -> Tile:
    """Of ``streams_backward_kernel``.

    Half as wide where products are of float32 numbers, or rows do not begin at 16 bytes.
    """
    tile = BACKWARD_FEW if num_streams <= 2 else BACKWARD
    if num_streams > MAX_FUSED_STREAMS:
        tile = BACKWARD_MANY
    if dtype != torch.bfloat16 or hidden_size * dtype.itemsize % 16:
        tile = tile._replace(channels=max(tile.channels // 2, 16))
    return tile.within(hidden_size)


def split_channels(tile: Tile, hidden_size: int) -> int:
    """Channels of one program of ``write_and_mix_kernel``, a multiple of its steps."""
    return min(SPLIT_CHANNELS, ceil_div(hidden_size, tile.channels) * tile.channels)
