# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of all ranks against each other on one clock.

A message starts when its send and its receive have both been posted and the ports at both ends are
free, as NCCL's point-to-point kernels do; it occupies the ports for bytes / rate and has arrived
(and counts as sent) a latency later. Messages of one direction between the same two ranks match in
the order of posting, each direction by itself, as on the process groups of this package.

The clock counts in whole ticks, so that a pipeline that does the same again takes exactly as long.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import RECEIVE, SEND, Message, Verb
from megatron_residuals.pipeline.schedule import Pass
from megatron_residuals.planner.simulate.deadlock import Blocked, Deadlock, OutOfOrder
from megatron_residuals.planner.simulate.links import Network
from megatron_residuals.planner.simulate.steps import Call, Program, Step, Wait

TICKS_PER_S = 2**60


class PassSpan(NamedTuple):
    """One pass and when it ran, in seconds from the start of the step."""

    rank: int
    step: Pass
    start_s: float
    end_s: float


class MessageSpan(NamedTuple):
    """One message and when it was on the wire; ``end_s`` includes the latency."""

    message: Message
    sender: int
    receiver: int
    bytes: int
    start_s: float
    end_s: float


class Snapshot(NamedTuple):
    """The pipeline as rank 0 is about to begin a group of micro-batches.

    Two of one step with an equal ``state`` are followed by the same, as far as the programs are the
    same: it tells times from now on, and micro-batches from the group's first one on.
    """

    micro_batch: int
    ticks: int
    state: Hashable


@dataclass(frozen=True)
class Timeline:
    """Everything that happened in a step; ``snapshots`` of its groups, if they were asked for."""

    num_ranks: int
    passes: tuple[PassSpan, ...]
    messages: tuple[MessageSpan, ...]
    end_ticks: int
    snapshots: tuple[Snapshot, ...]

    @property
    def step_s(self) -> float:
        """From the first pass to the end of the last pass or message."""
        return self.end_ticks / TICKS_PER_S


def play(
    layout: StageLayout,
    programs: Sequence[Program],
    pass_s: Callable[[Pass], float],
    message_bytes: Callable[[Message], int],
    network: Network,
    group_size: int | None = None,
) -> Timeline:
    """The timeline of a step, with a snapshot of every group of ``group_size`` micro-batches.

    Raises:
        Deadlock: ranks wait for each other in a circle, or for one that has finished.
        OutOfOrder: two ranks disagree on which message comes next.
    """
    return _Run(layout, programs, pass_s, message_bytes, network, group_size).run()


Handle = tuple[Verb, Message]
Channel = tuple[str, int, int]  # direction, sender, receiver


class _Run:
    def __init__(
        self,
        layout: StageLayout,
        programs: Sequence[Program],
        pass_s: Callable[[Pass], float],
        message_bytes: Callable[[Message], int],
        network: Network,
        group_size: int | None,
    ) -> None:
        self._layout, self._programs, self._network = layout, programs, network
        self._pass_s, self._message_bytes = pass_s, message_bytes
        self._group_size = group_size
        self._snapshots: list[Snapshot] = []
        self._waits = _waits(programs)
        self._next_step = [0] * len(programs)
        self._open: list[deque[Handle]] = [deque() for _ in programs]  # of the current step
        self._waiting: dict[int, Handle] = {}
        self._clock = [(0, rank) for rank in range(len(programs))]
        self._posted: dict[tuple[Channel, Verb], deque[Message]] = defaultdict(deque)
        self._done: dict[Message, int] = {}  # only what is still waited for
        self._port_free: dict[tuple[int, bool, str], int] = defaultdict(int)
        self._passes: list[PassSpan] = []
        self._messages: list[MessageSpan] = []
        self._end = 0

    def run(self) -> Timeline:
        heapq.heapify(self._clock)
        while self._clock:
            now, rank = heapq.heappop(self._clock)
            self._advance(rank, now)
        if self._waiting:
            raise Deadlock(self._blocked(), len(self._programs))
        return Timeline(
            len(self._programs),
            tuple(self._passes),
            tuple(self._messages),
            self._end,
            tuple(self._snapshots),
        )

    def _advance(self, rank: int, now: int) -> None:
        """Goes on with a rank until something takes time."""
        while True:
            while self._open[rank]:
                handle = self._open[rank][0]
                if handle[1] not in self._done:
                    self._waiting[rank] = handle
                    return
                self._open[rank].popleft()
                done = self._waited_for(handle[1])
                if done > now:
                    heapq.heappush(self._clock, (done, rank))
                    return
            if self._next_step[rank] == len(self._programs[rank]):
                return
            step = self._programs[rank][self._next_step[rank]]
            if self._begins_group(step):
                self._snapshots.append(self._snapshot(step.micro_batch, now))
            self._next_step[rank] += 1
            end = self._take(rank, step, now)
            if end > now:
                heapq.heappush(self._clock, (end, rank))
                return

    def _waited_for(self, message: Message) -> int:
        """When a message is done; forgotten when nobody waits for it again."""
        self._waits[message] -= 1
        return self._done[message] if self._waits[message] else self._done.pop(message)

    def _take(self, rank: int, step: Step, now: int) -> int:
        """Begins a step; when the rank goes on, apart from the handles it then waits for."""
        if isinstance(step, Pass):
            end = now + _ticks(self._pass_s(step))
            self._passes.append(PassSpan(rank, step, _seconds(now), _seconds(end)))
            self._end = max(self._end, end)
            return end
        if isinstance(step, Wait):
            self._open[rank].append((step.verb, step.message))
            return now
        for verb, message in step.handles:
            self._post(rank, verb, message, now)
        if step.blocking:
            self._open[rank].extend(step.handles)
        return now

    def _post(self, rank: int, verb: Verb, message: Message, now: int) -> None:
        sender, receiver = message.ends(self._layout)
        assert rank == (sender if verb == SEND else receiver), f"rank {rank} cannot {verb} this"
        channel = (message.direction, sender, receiver)
        self._posted[channel, verb].append(message)
        sent, expected = self._posted[channel, SEND], self._posted[channel, RECEIVE]
        if sent and expected:
            if sent[0] != expected[0]:
                raise OutOfOrder(sender, sent[0], receiver, expected[0])
            sent.popleft()
            expected.popleft()
            self._transfer(message, sender, receiver, now)

    def _transfer(self, message: Message, sender: int, receiver: int, now: int) -> None:
        link = self._network.link(sender, receiver)
        inside = self._network.is_inside(sender, receiver)
        ports = ((sender, inside, "out"), (receiver, inside, "in"))
        size = self._message_bytes(message)
        start = max(now, *(self._port_free[port] for port in ports))
        free = start + _ticks(size / link.bytes_per_s)
        for port in ports:
            self._port_free[port] = free
        end = free + _ticks(link.latency_s)
        self._end = max(self._end, end)
        if self._waits[message]:
            self._done[message] = end
        span = MessageSpan(message, sender, receiver, size, _seconds(start), _seconds(end))
        self._messages.append(span)
        for rank in (sender, receiver):
            # whoever waits for this message already looks again when it is done
            if rank in self._waiting and self._waiting[rank][1] == message:
                del self._waiting[rank]
                heapq.heappush(self._clock, (end, rank))

    def _begins_group(self, step: Step) -> TypeGuard[Pass]:
        if self._group_size is None or not isinstance(step, Pass):
            return False
        return step.forward and step.stage == 0 and step.micro_batch % self._group_size == 0

    def _snapshot(self, micro_batch: int, now: int) -> Snapshot:
        def later(ticks: int) -> int:
            return max(ticks - now, 0)

        def moved(message: Message) -> Message:
            return message._replace(micro_batch=message.micro_batch - micro_batch)

        state = (
            tuple(self._ahead(rank, micro_batch) for rank in range(len(self._programs))),
            tuple(sorted((later(ticks), rank) for ticks, rank in self._clock)),
            tuple(tuple((verb, moved(message)) for verb, message in due) for due in self._open),
            frozenset((rank, verb, moved(m)) for rank, (verb, m) in self._waiting.items()),
            frozenset((key, tuple(map(moved, due))) for key, due in self._posted.items() if due),
            frozenset((moved(m), later(done), self._waits[m]) for m, done in self._done.items()),
            frozenset((port, free - now) for port, free in self._port_free.items() if free > now),
        )
        return Snapshot(micro_batch, now, state)

    def _ahead(self, rank: int, micro_batch: int) -> Hashable:
        """Where a rank is: steps up to its next forward and backward, and which these are."""
        found: dict[bool, tuple[int, int, int]] = {}
        start = self._next_step[rank]
        for position in range(start, len(self._programs[rank])):
            step = self._programs[rank][position]
            if isinstance(step, Pass) and step.forward not in found:
                found[step.forward] = position - start, step.micro_batch - micro_batch, step.stage
                if len(found) == 2:
                    break
        return found.get(True), found.get(False)

    def _blocked(self) -> list[Blocked]:
        found = []
        for rank, (verb, message) in sorted(self._waiting.items()):
            sender, receiver = message.ends(self._layout)
            peer = receiver if verb == SEND else sender
            found.append(Blocked(rank, verb, message, peer))
        return found


def _waits(programs: Sequence[Program]) -> Counter[Message]:
    """How often each message is waited for, at both ends together."""
    waits: Counter[Message] = Counter()
    for step in itertools.chain.from_iterable(programs):
        if isinstance(step, Wait):
            waits[step.message] += 1
        elif isinstance(step, Call) and step.blocking:
            waits.update(message for _, message in step.handles)
    return waits


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def _seconds(ticks: int) -> float:
    return ticks / TICKS_PER_S
