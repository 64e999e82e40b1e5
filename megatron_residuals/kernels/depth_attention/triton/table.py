# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Lists of tensors for kernels: a table of addresses in the memory of the device.

A kernel that takes a table is compiled once for any number of tensors. The table is written by a
kernel too, from ordinary arguments: nothing is copied from the host, a captured graph replays the
launch with the addresses it was captured with, and the table is an ordinary tensor that the
allocator keeps in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_residuals.kernels.common.triton import ceil_div

SLOTS = 16  # of one launch
ALIGNMENT = 16  # bytes


@triton.jit(do_not_specialize=["first", "present"])
def address_kernel(
    p_table, p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
    first, present,
):  # fmt: skip
    """table[first + i] = address of argument i, or 0 where bit i of ``present`` is not set."""
    pointers = (
        p_0, p_1, p_2, p_3, p_4, p_5, p_6, p_7, p_8, p_9, p_10, p_11, p_12, p_13, p_14, p_15,
    )  # fmt: skip
    for i in tl.static_range(16):
        there = ((present >> i) & 1).to(tl.int64)
        tl.store(p_table + first + i, pointers[i].to(tl.int64) * there)


@triton.jit
def tensor_at(p_table, index, LIKE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a slot of a table, of a pointer type.

    ALIGNED promises addresses that are multiples of 16 bytes, for wide loads.
    """
    pointer = tl.load(p_table + index).to(LIKE)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def is_there(p_table, index):
    """Whether a slot of a table has an address."""
    return tl.load(p_table + index) != 0


def addresses(tensors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """The addresses of tensors of one dtype, 0 for None: int64 [m] on the device of ``like``.

    Launches fill tables of whole SLOTS: Triton 3.2's interpreter takes a scalar False for no mask.
    """
    slots = max(1, ceil_div(len(tensors), SLOTS)) * SLOTS
    table = torch.empty(slots, dtype=torch.int64, device=like.device)
    for first in range(0, len(tensors), SLOTS):
        part = tensors[first : first + SLOTS]
        padded = [like if each is None else each for each in part] + [like] * (SLOTS - len(part))
        present = sum(1 << i for i, each in enumerate(part) if each is not None)
        address_kernel[(1,)](table, *padded, first, present, num_warps=1)
    return table[: len(tensors)]


def aligned(*tensors: Tensor | None) -> bool:
    """Whether every row [d] of all these contiguous tensors [T, d] starts at a 16-byte boundary."""
    return all(
        each is None
        or (each.data_ptr() % ALIGNMENT == 0 and each.shape[-1] * each.element_size() % 16 == 0)
        for each in tensors
    )
