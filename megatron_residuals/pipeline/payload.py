# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The length of a payload [length, b, h]: rows of [s, b, h], and a tail of numbers for each token.

A number is as wide as several elements of a 16-bit payload: its ``slots``.
"""

from __future__ import annotations


def tail_length(numbers: int, sequence: int, hidden: int, slots: int) -> int:
    """Length of the tail that holds some numbers for each of s tokens."""
    return -(-numbers * sequence * slots // hidden)


def payload_length(rows: int, numbers: int, sequence: int, hidden: int, slots: int) -> int:
    """Length of rows and tail."""
    return rows * sequence + tail_length(numbers, sequence, hidden, slots)


def sequence_of(length: int, rows: int, numbers: int, hidden: int, slots: int) -> int | None:
    """s of a payload of some length; None if there is none."""
    sequence = length * hidden // (rows * hidden + numbers * slots)
    fits = payload_length(rows, numbers, sequence, hidden, slots) == length
    return sequence if fits else None
