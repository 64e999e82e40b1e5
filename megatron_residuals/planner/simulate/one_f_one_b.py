# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program of a rank in the host's 1F1B schedule, which waits in every communicator call."""

from __future__ import annotations

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
from megatron_residuals.pipeline.schedule import Pass, warm_up
from megatron_residuals.planner.simulate.steps import Call, Program


def one_f_one_b(layout: StageLayout, rank: int, num_microbatches: int) -> Program:
    """Passes and calls of a rank with one stage.

        warm-up     receive, forward, send                                P - rank - 1 times
        steady      forward; send it and receive a gradient; backward;
                    send its gradient and receive the next input
        cool-down   receive a gradient, backward, send the gradient

    Source: `forward_backward_pipelining_without_interleaving` of Megatron-Core 0.16 to 0.19; one
    rank alone is its `forward_backward_no_pipelining`.
    """
    program: Program = []
    ahead = min(warm_up(layout, rank, 1), num_microbatches)
    steady = num_microbatches - ahead

    def call(*messages: tuple[Verb, Direction, int]) -> None:
        found: dict[Verb, list[Message]] = {SEND: [], RECEIVE: []}
        for verb, direction, micro_batch in messages:
            forward_in = (direction == FORWARD) == (verb == RECEIVE)
            boundary = rank if forward_in else rank + 1
            if 0 < boundary < layout.num_stages:
                found[verb].append(Message(direction, boundary, micro_batch))
        if found[SEND] or found[RECEIVE]:
            program.append(Call(tuple(found[SEND]), tuple(found[RECEIVE]), True))

    for m in range(ahead):
        call((RECEIVE, FORWARD, m))
        program.append(Pass(True, m, rank))
        call((SEND, FORWARD, m))
    if steady:
        call((RECEIVE, FORWARD, ahead))
    for m in range(steady):
        program.append(Pass(True, m + ahead, rank))
        call((SEND, FORWARD, m + ahead), (RECEIVE, BACKWARD, m))
        program.append(Pass(False, m, rank))
        more: list[tuple[Verb, Direction, int]] = []
        if m < steady - 1:
            more.append((RECEIVE, FORWARD, m + ahead + 1))
        call((SEND, BACKWARD, m), *more)
    for m in range(steady, num_microbatches):
        call((RECEIVE, BACKWARD, m))
        program.append(Pass(False, m, rank))
        call((SEND, BACKWARD, m))
    return program
