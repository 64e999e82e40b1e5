# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How each kernel is cut, by the hidden size, the dtype and the number of readers alone.

Neither the number of tokens nor a measurement at run time has a say in the order of a token's sums.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_residuals.kernels.common.triton import Tile, ceil_div, power_of_two


class Rows(NamedTuple):
    """Kernels that hold a whole row [d] of a token on chip: padded size and warps."""

    size: int
    num_warps: int


ROW_NUMBERS, MERGE_ROW_NUMBERS = 16, 32  # of a row in one thread
SCORES = Tile(64, 64, 4, 3, readers=16)
MIX = Tile(4, 256, 4, None, readers=8)
PRODUCTS = Tile(4, 256, 4, None, readers=8)
ACCUMULATE = Tile(32, 64, 4, None, readers=16)

MAX_GROUPS = 1024  # of tokens, each with its own partial gradient of a direction
GROUP_TOKENS = 16  # at least


def rows(hidden_size: int, numbers: int = ROW_NUMBERS) -> Rows:
    """Of the kernels of one reader, with so many numbers of a row in a thread."""
    size = power_of_two(hidden_size, 32)
    return Rows(size, min(32, max(1, size // (32 * numbers))))


def merge_rows(hidden_size: int) -> Rows:
    """Of ``merge_kernel``, which holds few rows."""
    return rows(hidden_size, MERGE_ROW_NUMBERS)


def accumulate_tile(hidden_size: int, itemsize: int, readers: int) -> Tile:
    """Of ``accumulate_kernel``: all readers at once."""
    tile = ACCUMULATE
    if itemsize > 2:
        tile = tile._replace(num_warps=2 * tile.num_warps)
    return tile._replace(readers=power_of_two(readers, 16)).within(hidden_size)


def row_group(tokens: int) -> int:
    """Tokens of one program that sums over tokens, one after the other."""
    return max(GROUP_TOKENS, ceil_div(tokens, MAX_GROUPS))


def tile_group(tokens: int, tile: Tile) -> int:
    """The same for steps of several tokens."""
    steps = max(8, ceil_div(tokens, 64 * tile.tokens))
    return steps * tile.tokens
