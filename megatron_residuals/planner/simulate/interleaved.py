# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program of a rank in the host's interleaved schedule, call by call.

The k-th pass of a rank is that of a *virtual micro-batch*, a micro-batch and a chunk; warm-up runs
forwards, the steady part one forward and one backward by turns, cool-down the backwards left over.
What a rank receives in the call behind its k-th pass is the input of its next pass; only the rank
that leads a direction (the first forward, the last backward) receives what the rank at the other
end, P - 1 passes behind it, has just made for its next chunk.

Source: `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.16 to 0.19.
"""

from __future__ import annotations

from collections import deque

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.messages import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    SEND,
    Direction,
    Message,
)
from megatron_residuals.pipeline.schedule import Pass, schedule, warm_up
from megatron_residuals.planner.simulate.steps import Call, Program, Wait

OVERLAPS = ("off", "steady", "all")
"""No overlap of messages with passes; in the steady part (the host's default); warm-up and
cool-down as well (its ``--overlap-p2p-communication-warmup-flush``)."""


def interleaved(
    layout: StageLayout,
    rank: int,
    num_microbatches: int,
    group_size: int,
    *,
    overlap: str = "steady",
    waits_for_sends: bool = True,
) -> Program:
    """Passes, calls and waits of a rank with several chunks.

    ``waits_for_sends``: an output is emptied only once it has been sent, so an overlapping
    schedule waits for the send right behind the call (Megatron-Core from 0.18 on, when it
    deallocates pipeline outputs, its default); otherwise behind the next call.
    """
    writer = _Writer(layout, rank, num_microbatches, group_size, overlap, waits_for_sends)
    writer.warm_up()
    writer.steady()
    writer.cool_down()
    return writer.program


class _Writer:
    """Writes one rank's program; the state is that of the host's loop."""

    def __init__(
        self,
        layout: StageLayout,
        rank: int,
        num_microbatches: int,
        group_size: int,
        overlap: str,
        waits_for_sends: bool,
    ) -> None:
        self.program: Program = []
        self._layout, self._rank = layout, rank
        self._overlap, self._waits_for_sends = overlap, waits_for_sends
        self._passes: dict[Direction, list[Pass]] = {FORWARD: [], BACKWARD: []}
        for each in schedule(layout, rank, num_microbatches, group_size):
            self._passes[FORWARD if each.forward else BACKWARD].append(each)
        self._total = len(self._passes[FORWARD])
        self._warm_up = min(warm_up(layout, rank, group_size), self._total)
        self._due: dict[Direction, deque[Message]] = {FORWARD: deque(), BACKWARD: deque()}
        self._sending: dict[Direction, Message | None] = {FORWARD: None, BACKWARD: None}

    # which messages

    def _input(self, k: int, direction: Direction) -> Message | None:
        _, micro_batch, stage = self._passes[direction][k]
        return self._message(direction, stage if direction == FORWARD else stage + 1, micro_batch)

    def _output(self, k: int, direction: Direction) -> Message | None:
        _, micro_batch, stage = self._passes[direction][k]
        return self._message(direction, stage + 1 if direction == FORWARD else stage, micro_batch)

    def _message(self, direction: Direction, boundary: int, micro_batch: int) -> Message | None:
        inside = 0 < boundary < self._layout.num_stages
        return Message(direction, boundary, micro_batch) if inside else None

    def _leads(self, direction: Direction) -> bool:
        return self._rank == (0 if direction == FORWARD else self._layout.num_ranks - 1)

    def _arriving(self, k: int, direction: Direction) -> Message | None:
        """What is received in the call behind the k-th pass."""
        if not self._leads(direction):
            return self._input(k + 1, direction) if k + 1 < self._total else None
        behind = k - (self._layout.num_ranks - 1)
        if behind < 0:
            return None
        _, micro_batch, stage = self._passes[direction][behind]
        last = self._layout.num_chunks - 1 if direction == FORWARD else 0
        if self._layout.chunk(stage) == last:
            return None
        ranks = self._layout.num_ranks
        if direction == FORWARD:
            return Message(direction, stage + ranks, micro_batch)
        return Message(direction, stage - ranks + 1, micro_batch)

    # what is written

    def _pass(self, k: int, direction: Direction) -> None:
        self.program.append(self._passes[direction][k])

    def _call(self, *pairs: tuple[Message | None, Message | None], blocking: bool) -> None:
        """One call with a send and a receive per direction, forward first."""
        sends = tuple(send for send, _ in pairs if send is not None)
        receives = tuple(receive for _, receive in pairs if receive is not None)
        if sends or receives:
            self.program.append(Call(sends, receives, blocking))
        if not blocking:
            for message in receives:
                self._due[message.direction].append(message)

    def _start(self, direction: Direction, send: Message | None, receive: Message | None) -> None:
        """A call that does not wait; then the waits for sends as the host orders them."""
        self._call((send, receive), blocking=False)
        self._wait_for_send(direction)
        self._sending[direction] = send
        if direction == FORWARD and self._waits_for_sends:
            self._wait_for_send(direction)

    def _wait_for_send(self, direction: Direction) -> None:
        message = self._sending[direction]
        if message is not None:
            self.program.append(Wait(SEND, message))
            self._sending[direction] = None

    def _wait_for_input(self, k: int, direction: Direction) -> None:
        """Waits for the oldest receive that is still open, if the pass has an input at all."""
        if self._input(k, direction) is not None and self._due[direction]:
            self.program.append(Wait(RECEIVE, self._due[direction].popleft()))

    # the three parts

    def warm_up(self) -> None:
        """Forwards up to the first backward."""
        early = self._overlap == "all"
        self._call((None, self._input(0, FORWARD)), blocking=True)
        for k in range(self._warm_up):
            if early and k:
                self._wait_for_input(k, FORWARD)
            arriving = self._arriving(k, FORWARD) if k + 1 < self._total else None
            if early and not self._leads(FORWARD):
                self._call((None, arriving), blocking=False)
                arriving = None
            self._pass(k, FORWARD)
            leaving = self._output(k, FORWARD)
            if early:
                self._start(FORWARD, leaving, arriving)
            elif self._overlap == "off" and self._is_last_before_steady(k):
                self._call((leaving, arriving), (None, self._input(0, BACKWARD)), blocking=True)
            else:
                self._call((leaving, arriving), blocking=True)
            if self._overlap != "off" and self._is_last_before_steady(k):
                self._start(BACKWARD, None, self._input(0, BACKWARD))

    def _is_last_before_steady(self, k: int) -> bool:
        return k == self._warm_up - 1 and self._warm_up < self._total

    def steady(self) -> None:
        """One forward and one backward by turns."""
        for b, k in enumerate(range(self._warm_up, self._total)):
            is_last = k == self._total - 1
            ahead = None if is_last else self._arriving(k, FORWARD)
            if self._overlap == "off":
                self._pass(k, FORWARD)
                self._pass(b, BACKWARD)
                self._call(
                    (self._output(k, FORWARD), ahead),
                    (self._output(b, BACKWARD), self._arriving(b, BACKWARD)),
                    blocking=True,
                )
                continue
            self._wait_for_input(k, FORWARD)
            self._pass(k, FORWARD)
            self._start(FORWARD, self._output(k, FORWARD), ahead)
            self._wait_for_input(b, BACKWARD)
            self._pass(b, BACKWARD)
            self._start(BACKWARD, self._output(b, BACKWARD), self._arriving(b, BACKWARD))

    def cool_down(self) -> None:
        """The backwards that are left."""
        total, steady = self._total, self._total - self._warm_up
        early = self._overlap == "all"
        if not steady:
            self._call((None, self._input(0, BACKWARD)), blocking=True)
        for k in range(steady, total):
            if k:
                self._wait_for_input(k, BACKWARD)
            arriving = self._arriving(k, BACKWARD) if k < total - 1 else None
            if early and not self._leads(BACKWARD):
                self._call((None, arriving), blocking=False)
                arriving = None
            self._pass(k, BACKWARD)
            if early:
                self._start(BACKWARD, self._output(k, BACKWARD), arriving)
            else:
                self._call((self._output(k, BACKWARD), arriving), blocking=True)
        self._wait_for_send(BACKWARD)
