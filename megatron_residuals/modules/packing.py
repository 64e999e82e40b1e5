# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Streams and wide numbers of every token in one payload, bit for bit, and so their gradients.

The numbers lie behind the rows, as the bits of as many elements as they are wide; in backward the
same places hold the bits of their gradients. Nothing may add or scale a payload on its way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_residuals.functional.precision import wide_dtype
from megatron_residuals.pipeline.payload import sequence_of, tail_length


def slots_of(dtype: torch.dtype) -> int:
    """Elements of a payload of a dtype that hold one number."""
    return torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize


def _join(streams: Tensor, numbers: Tensor) -> Tensor:
    """[s, b, n, d] and [s, b, m] -> [n s + tail, b, d]."""
    sequence, batch, _, width = streams.shape
    rows = streams.reshape(-1, batch, width)
    bits = numbers.contiguous().view(streams.dtype).flatten()
    slots = slots_of(streams.dtype)
    length = tail_length(numbers.shape[-1], sequence, width, slots)
    tail = streams.new_zeros(length, batch, width)
    tail.view(-1)[: bits.numel()] = bits
    return torch.cat((rows, tail))


def _split(payload: Tensor, num_streams: int, num_numbers: int) -> tuple[Tensor, Tensor]:
    """The inverse: streams that are the payload's memory, and numbers of their own."""
    length, batch, width = payload.shape
    slots = slots_of(payload.dtype)
    sequence = sequence_of(length, num_streams, num_numbers, width, slots)
    if sequence is None:
        raise ValueError(
            f"a payload of length {length} is no {num_streams} streams with {num_numbers} numbers "
            f"for each token of width {width}; both sides need the same residual"
        )
    rows, size = num_streams * sequence, sequence * batch * num_numbers * slots
    bits = payload[rows:].reshape(-1)[:size].clone()
    numbers = bits.view(wide_dtype(payload)).view(sequence, batch, num_numbers)
    return payload[:rows].view(sequence, batch, num_streams, width), numbers


class Packed(torch.autograd.Function):
    """Streams [s, b, n, d] and numbers [s, b, m], float32 or wider, as one payload."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, numbers: Tensor) -> Tensor:
        """The payload."""
        ctx.counts = streams.shape[2], numbers.shape[-1]
        return _join(streams, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients that a payload of gradients holds."""
        return _split(gradient.contiguous(), *ctx.counts)


class Unpacked(torch.autograd.Function):
    """The inverse of ``Packed``; the streams are the payload's memory."""

    @staticmethod
    def forward(
        ctx: Any, payload: Tensor, num_streams: int, num_numbers: int
    ) -> tuple[Tensor, Tensor]:
        """The streams and the numbers."""
        return _split(payload, num_streams, num_numbers)

    @staticmethod
    def backward(ctx: Any, d_streams: Tensor, d_numbers: Tensor) -> tuple[Tensor, None, None]:
        """A payload of gradients."""
        return _join(d_streams, d_numbers), None, None
