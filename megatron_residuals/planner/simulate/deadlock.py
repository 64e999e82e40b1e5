# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with programs that cannot end: who waits for what from whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_residuals.pipeline.messages import SEND, Message, Verb


class Blocked(NamedTuple):
    """A rank that waits to ``verb`` (send, receive) a message whose other end is at ``peer``."""

    rank: int
    verb: Verb
    message: Message
    peer: int

    def __str__(self) -> str:
        preposition = "to" if self.verb == SEND else "from"
        return (
            f"rank {self.rank} waits to {self.verb} the {self.message}, {preposition} rank "
            f"{self.peer}"
        )


class Deadlock(RuntimeError):
    """No rank can go on; ``cycle`` has the ranks that wait for each other, in order.

    It is empty when they wait for a rank that has finished its step.
    """

    def __init__(self, blocked: Sequence[Blocked], num_ranks: int) -> None:
        self.blocked = tuple(blocked)
        self.cycle = _cycle(self.blocked)
        if self.cycle:
            ranks = [each.rank for each in self.cycle]
            head = "deadlock, ranks " + " -> ".join(map(str, [*ranks, ranks[0]]))
        else:
            waiting = {each.rank for each in self.blocked}
            finished = sorted({each.peer for each in self.blocked} - waiting)
            head = f"deadlock, ranks wait for {finished}, which have finished their step"
        shown = self.cycle or self.blocked
        rest = len(self.blocked) - len(shown)
        lines = [f"{head}:", *(f"  {each}" for each in shown)]
        lines += [f"  and {rest} of {num_ranks} ranks wait for those"] if rest else []
        super().__init__("\n".join(lines))


class OutOfOrder(RuntimeError):
    """Two ranks disagree on the next message between them."""

    def __init__(self, sender: int, sent: Message, receiver: int, expected: Message) -> None:
        self.sent, self.expected = sent, expected
        super().__init__(
            f"messages out of order: rank {sender} sends the {sent}; rank {receiver} expects the "
            f"{expected}. The two ranks walk different schedules."
        )


def _cycle(blocked: Sequence[Blocked]) -> tuple[Blocked, ...]:
    """The first circle that following the peers runs into."""
    by_rank = {each.rank: each for each in blocked}
    for start in by_rank:
        path: list[int] = []
        rank = start
        while rank in by_rank and rank not in path:
            path.append(rank)
            rank = by_rank[rank].peer
        if rank in path:
            return tuple(by_rank[each] for each in path[path.index(rank) :])
    return ()
