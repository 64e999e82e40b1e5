# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How the AttnRes kernels are cut, by the hidden size, the dtype and the readers alone.

Neither the number of tokens nor a measurement at run time has a say in the order of a token's sums.
Candidates are what a benchmark may try.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_residuals.kernels.triton.common import ceil_div, power_of_two


class Rows(NamedTuple):
    """Kernels that hold a whole row [d] of a token on chip: padded size and warps."""

    size: int
    num_warps: int


class Tile(NamedTuple):
    """Readers, tokens and channels of one step; warps; stages of its loads."""

    readers: int
    tokens: int
    channels: int
    num_warps: int
    num_stages: int = 1


# numbers of a row in one thread
ROW_CANDIDATES = (16, 32, 8)
SCORE_CANDIDATES = (Tile(16, 64, 64, 4, 3), Tile(16, 128, 64, 4, 3), Tile(16, 64, 128, 4, 2))
MIX_CANDIDATES = (Tile(8, 4, 256, 4), Tile(8, 2, 512, 4), Tile(8, 4, 256, 8), Tile(4, 4, 512, 4))
PRODUCT_CANDIDATES = (Tile(8, 4, 256, 4), Tile(8, 2, 512, 4), Tile(8, 2, 256, 4))
ACCUMULATE_CANDIDATES = (Tile(16, 32, 64, 4), Tile(16, 16, 128, 4), Tile(16, 32, 128, 8))

MAX_GROUPS = 1024  # of tokens, each with its own partial gradient of a direction
GROUP_TOKENS = 16  # at least


def rows(hidden_size: int, numbers: int = ROW_CANDIDATES[0]) -> Rows:
    """Of the kernels of one reader, with so many numbers of a row in a thread."""
    size = power_of_two(hidden_size, 32)
    return Rows(size, min(32, max(1, size // (32 * numbers))))


def merge_rows(hidden_size: int) -> Rows:
    """Of ``merge_kernel``, which holds few rows."""
    return rows(hidden_size, 32)


def score_tile(hidden_size: int) -> Tile:
    """Of ``scores_kernel``."""
    return _within(SCORE_CANDIDATES[0], hidden_size)


def mix_tile(hidden_size: int) -> Tile:
    """Of ``mix_kernel``."""
    return _within(MIX_CANDIDATES[0], hidden_size)


def product_tile(hidden_size: int) -> Tile:
    """Of ``products_kernel``."""
    return _within(PRODUCT_CANDIDATES[0], hidden_size)


def accumulate_tile(hidden_size: int, itemsize: int, readers: int) -> Tile:
    """Of ``accumulate_kernel``: all readers at once."""
    tile = ACCUMULATE_CANDIDATES[0]
    if itemsize > 2:
        tile = tile._replace(num_warps=2 * tile.num_warps)
    return _within(tile._replace(readers=power_of_two(readers, 16)), hidden_size)


def row_group(tokens: int) -> int:
    """Tokens of one program that sums over tokens, one after the other."""
    return max(GROUP_TOKENS, ceil_div(tokens, MAX_GROUPS))


def tile_group(tokens: int, tile: Tile) -> int:
    """The same for steps of several tokens."""
    steps = max(8, ceil_div(tokens, 64 * tile.tokens))
    return steps * tile.tokens


def _within(tile: Tile, hidden_size: int) -> Tile:
    """No more channels in a step than there are, in powers of two."""
    return tile._replace(channels=min(tile.channels, power_of_two(hidden_size, 16)))
