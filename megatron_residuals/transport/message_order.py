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

from megatron_residuals.pipeline.plan import StageLayout
from megatron_residuals.transport.late import Message

ScheduleTable = Sequence[tuple[int, int]]  # (micro-batch, chunk) in the order of forward passes


class MessageOrder:
    """The messages that one rank receives and sends in one step, in order.

    Without a table there must be one chunk for each rank, and the order has no end.
    """

    def __init__(self, layout: StageLayout, rank: int, table: ScheduleTable | None = None) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._queues: dict[tuple[str, str], deque[int]] | None = None
        self._constant = {
            ("forward", "receive"): rank,
            ("forward", "send"): rank + 1,
            ("backward", "receive"): rank + 1,
            ("backward", "send"): rank,
        }
        if table is not None:
            last_chunk = layout.num_chunks - 1
            forward = [layout.stage(rank, chunk) for _, chunk in table]
            backward = [layout.stage(rank, last_chunk - chunk) for _, chunk in table]
            ahead = range(1, layout.num_stages)  # boundaries, named by the stage behind them
            self._queues = {
                ("forward", "receive"): deque(g for g in forward if g in ahead),
                ("forward", "send"): deque(g + 1 for g in forward if g + 1 in ahead),
                ("backward", "receive"): deque(g + 1 for g in backward if g + 1 in ahead),
                ("backward", "send"): deque(g for g in backward if g in ahead),
            }

    def next(self, direction: str, verb: str) -> Message:
        """The next message that is received or sent (``verb``) in a direction.

        Raises:
            RuntimeError: the table has no such message left.
        """
        key = (direction, verb)
        if self._queues is not None and not self._queues[key]:
            raise RuntimeError(
                f"the schedule wants to {verb} a {direction} message more than its table has; its "
                "get_schedule_table was not called for this step, or it walks in another order"
            )
        boundary = self._constant[key] if self._queues is None else self._queues[key].popleft()
        micro_batch = self._counts[direction, verb, boundary]
        self._counts[direction, verb, boundary] += 1
        return Message(direction, boundary, micro_batch)

    @property
    def has_received_all(self) -> bool:
        """Whether every message of an interleaved step has been asked for."""
        if self._queues is None:
            return False
        return not any(self._queues[direction, "receive"] for direction in ("forward", "backward"))
