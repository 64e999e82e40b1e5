# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of all ranks against each other on one clock.

A message starts when its send and its receive have both been posted and the ports at both ends are
free, as NCCL's point-to-point kernels do; it occupies the ports for bytes / rate and has arrived
(and counts as sent) a latency later. Messages of one direction between the same two ranks match in
the order of posting, each direction by itself, as on the process groups of this package.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import RECEIVE, SEND, Message, Verb
from megatron_residuals.pipeline.schedule import Pass
from megatron_residuals.planner.simulate.deadlock import Blocked, Deadlock, OutOfOrder
from megatron_residuals.planner.simulate.links import Network
from megatron_residuals.planner.simulate.steps import Program, Step, Wait


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


@dataclass(frozen=True)
class Timeline:
    """Everything that happened in a step."""

    num_ranks: int
    passes: tuple[PassSpan, ...]
    messages: tuple[MessageSpan, ...]

    @property
    def step_s(self) -> float:
        """From the first pass to the end of the last pass or message."""
        ends_s = [span.end_s for span in self.passes]
        return max(ends_s + [span.end_s for span in self.messages])

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(span.end_s - span.start_s for span in self.passes if span.rank == rank)


def play(
    layout: StageLayout,
    programs: Sequence[Program],
    pass_s: Callable[[Pass], float],
    message_bytes: Callable[[Message], int],
    network: Network,
) -> Timeline:
    """The timeline of a step.

    Raises:
        Deadlock: ranks wait for each other in a circle, or for one that has finished.
        OutOfOrder: two ranks disagree on which message comes next.
    """
    return _Run(layout, programs, pass_s, message_bytes, network).run()


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
    ) -> None:
        self._layout, self._programs, self._network = layout, programs, network
        self._pass_s, self._message_bytes = pass_s, message_bytes
        self._next_step = [0] * len(programs)
        self._open: list[deque[Handle]] = [deque() for _ in programs]  # of the current step
        self._waiting: dict[int, Handle] = {}
        self._clock = [(0.0, rank) for rank in range(len(programs))]
        self._posted: dict[tuple[Channel, Verb], deque[Message]] = defaultdict(deque)
        self._done_s: dict[Message, float] = {}
        self._port_free_s: dict[tuple[int, bool, str], float] = defaultdict(float)
        self._passes: list[PassSpan] = []
        self._messages: list[MessageSpan] = []

    def run(self) -> Timeline:
        heapq.heapify(self._clock)
        while self._clock:
            now_s, rank = heapq.heappop(self._clock)
            self._advance(rank, now_s)
        if self._waiting:
            raise Deadlock(self._blocked(), len(self._programs))
        return Timeline(len(self._programs), tuple(self._passes), tuple(self._messages))

    def _advance(self, rank: int, now_s: float) -> None:
        """Goes on with a rank until something takes time."""
        while True:
            while self._open[rank]:
                handle = self._open[rank][0]
                done_s = self._done_s.get(handle[1])
                if done_s is None:
                    self._waiting[rank] = handle
                    return
                self._open[rank].popleft()
                if done_s > now_s:
                    heapq.heappush(self._clock, (done_s, rank))
                    return
            if self._next_step[rank] == len(self._programs[rank]):
                return
            step = self._programs[rank][self._next_step[rank]]
            self._next_step[rank] += 1
            end_s = self._take(rank, step, now_s)
            if end_s > now_s:
                heapq.heappush(self._clock, (end_s, rank))
                return

    def _take(self, rank: int, step: Step, now_s: float) -> float:
        """Begins a step; when the rank goes on, apart from the handles it then waits for."""
        if isinstance(step, Pass):
            end_s = now_s + self._pass_s(step)
            self._passes.append(PassSpan(rank, step, now_s, end_s))
            return end_s
        if isinstance(step, Wait):
            self._open[rank].append((step.verb, step.message))
            return now_s
        for verb, message in step.handles:
            self._post(rank, verb, message, now_s)
        if step.blocking:
            self._open[rank].extend(step.handles)
        return now_s

    def _post(self, rank: int, verb: Verb, message: Message, now_s: float) -> None:
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
            self._transfer(message, sender, receiver, now_s)

    def _transfer(self, message: Message, sender: int, receiver: int, now_s: float) -> None:
        link = self._network.link(sender, receiver)
        inside = self._network.is_inside(sender, receiver)
        ports = ((sender, inside, "out"), (receiver, inside, "in"))
        size = self._message_bytes(message)
        start_s = max(now_s, *(self._port_free_s[port] for port in ports))
        free_s = start_s + size / link.bytes_per_s
        for port in ports:
            self._port_free_s[port] = free_s
        end_s = free_s + link.latency_s
        self._done_s[message] = end_s
        self._messages.append(MessageSpan(message, sender, receiver, size, start_s, end_s))
        for rank in (sender, receiver):
            # whoever waits for this message already looks again when it is done
            if rank in self._waiting and self._waiting[rank][1] == message:
                del self._waiting[rank]
                heapq.heappush(self._clock, (end_s, rank))

    def _blocked(self) -> list[Blocked]:
        found = []
        for rank, (verb, message) in sorted(self._waiting.items()):
            sender, receiver = message.ends(self._layout)
            peer = receiver if verb == SEND else sender
            found.append(Blocked(rank, verb, message, peer))
        return found
