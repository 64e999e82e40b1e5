# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How each kernel is cut, by the number of streams, the hidden size and the dtype alone.

Neither the number of tokens nor a measurement at run time has a say: the same numbers are added in
the same order in every run and for every batch. Candidates are what a benchmark may try.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_residuals.kernels.triton.common import ceil_div, power_of_two

MAX_FUSED_STREAMS = 4  # more have too many coefficients to be projected or held beside the planes
COEFFICIENT_TOKENS, COEFFICIENT_WARPS = 64, 2
GROUP_STEPS = 32  # of a group of tokens, which has its own partial gradient of the mapping


class Tile(NamedTuple):
    """Tokens and channels of one step, warps of a program, stages of its loads."""

    tokens: int
    channels: int
    num_warps: int
    num_stages: int = 1


POST_CANDIDATES = (Tile(64, 32, 8), Tile(64, 64, 16), Tile(64, 64, 8), Tile(128, 32, 16))
MIX_CANDIDATES = (Tile(64, 64, 8), Tile(64, 128, 8), Tile(64, 32, 4))
READ_CANDIDATES = (Tile(4, 1024, 4), Tile(2, 1024, 4), Tile(8, 512, 4), Tile(1, 2048, 4))
PRODUCT_CANDIDATES = (Tile(4, 512, 4), Tile(2, 512, 4), Tile(2, 1024, 4))
PLANE_CANDIDATES = (
    Tile(16, 64, 4, 2),
    Tile(16, 64, 8, 2),
    Tile(32, 64, 8, 2),
    Tile(16, 128, 8),
)

SPLIT_CHANNELS = 1024  # of a program of post_and_mix


def post_tile(num_streams: int, hidden_size: int, *, updates: bool) -> Tile:
    """Of ``post_and_mix_kernel``; without an update there is less to hold."""
    if num_streams > MAX_FUSED_STREAMS:
        return _within(Tile(32, 32, 8), hidden_size)
    return _within(POST_CANDIDATES[0] if updates else MIX_CANDIDATES[0], hidden_size)


def read_tile(hidden_size: int) -> Tile:
    """Of ``read_kernel``."""
    return _within(READ_CANDIDATES[0], hidden_size)


def product_tile(num_streams: int, hidden_size: int) -> Tile:
    """Of ``products_kernel``: one sum for each stream stays in registers."""
    tile = PRODUCT_CANDIDATES[0] if num_streams <= MAX_FUSED_STREAMS else Tile(2, 256, 4)
    return _within(tile, hidden_size)


def plane_tile(num_streams: int, hidden_size: int, dtype: torch.dtype) -> Tile:
    """Of ``planes_backward_kernel``.

    Half as wide where products are of float32 numbers, or rows do not begin at 16 bytes.
    """
    tile = PLANE_CANDIDATES[num_streams <= 2]
    if num_streams > MAX_FUSED_STREAMS:
        tile = Tile(16, 32, 4)
    if dtype != torch.bfloat16 or hidden_size * dtype.itemsize % 16:
        tile = tile._replace(channels=max(tile.channels // 2, 16))
    return _within(tile, hidden_size)


def split_channels(tile: Tile, hidden_size: int) -> int:
    """Channels of one program of ``post_and_mix_kernel``, a multiple of its steps."""
    return min(SPLIT_CHANNELS, ceil_div(hidden_size, tile.channels) * tile.channels)


def _within(tile: Tile, hidden_size: int) -> Tile:
    """No wider than the hidden size, and no narrower than a tensor core takes."""
    return tile._replace(channels=min(tile.channels, power_of_two(hidden_size, 16)))
