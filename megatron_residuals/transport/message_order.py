# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which message comes next on a rank, known to both ends without telling each other.

Every rank walks the same schedule: the k-th forward message into a rank belongs to its k-th forward
pass that has an input, and likewise for what it sends and for gradients, whose passes take the
chunks in reverse.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    SEND,
    Direction,
    Message,
    Verb,
)

ScheduleTable = Sequence[tuple[int, int]]  # (micro-batch, chunk) in the order of forward passes


class Walk(NamedTuple):
    """How a schedule goes through a step; ranks that walk otherwise wait for each other forever."""

    num_microbatches: int
    microbatch_group_size: int
    forward_only: bool


class MessageOrder:
    """The messages that one rank receives and sends in one step, in order."""

    def __init__(self, layout: StageLayout, rank: int, table: ScheduleTable) -> None:
        last_chunk = layout.num_chunks - 1
        forward = [layout.stage(rank, chunk) for _, chunk in table]
        backward = [layout.stage(rank, last_chunk - chunk) for _, chunk in table]
        ahead = range(1, layout.num_stages)  # boundaries, named by the stage behind them
        self._counts: Counter[tuple[Direction, Verb, int]] = Counter()
        self._boundaries: dict[tuple[Direction, Verb], deque[int]] = {
            (FORWARD, RECEIVE): deque(g for g in forward if g in ahead),
            (FORWARD, SEND): deque(g + 1 for g in forward if g + 1 in ahead),
            (BACKWARD, RECEIVE): deque(g + 1 for g in backward if g + 1 in ahead),
            (BACKWARD, SEND): deque(g for g in backward if g in ahead),
        }

    def next(self, direction: Direction, verb: Verb) -> Message:
        """The next message that is received or sent (``verb``) in a direction.

        Raises:
            RuntimeError: the table has no such message left.
        """
        boundaries = self._boundaries[direction, verb]
        if not boundaries:
            raise RuntimeError(
                f"the schedule wants to {verb} a {direction} message more than the step has that "
                "it began. Begin steps with what get_forward_backward_func() returns after "
                "megatron_residuals.specs was imported; if that was so, this Megatron-Core walks "
                "in another order than those that megatron_residuals was tested with"
            )
        boundary = boundaries.popleft()
        micro_batch = self._counts[direction, verb, boundary]
        self._counts[direction, verb, boundary] += 1
        return Message(direction, boundary, micro_batch)
