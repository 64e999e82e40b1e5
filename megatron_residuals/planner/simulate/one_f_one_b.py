# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program of a rank in the host's 1F1B schedule, which waits in every communicator call."""

from __future__ import annotations

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.schedule import Pass, warm_up
from megatron_residuals.planner.simulate.steps import (
    BACKWARD,
    FORWARD,
    Call,
    Message,
    Program,
)


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

    def call(*messages: tuple[str, str, int]) -> None:
        found: dict[str, list[Message]] = {"send": [], "receive": []}
        for verb, direction, micro_batch in messages:
            forward_in = (direction == FORWARD) == (verb == "receive")
            boundary = rank if forward_in else rank + 1
            if 0 < boundary < layout.num_stages:
                found[verb].append(Message(direction, boundary, micro_batch))
        if found["send"] or found["receive"]:
            program.append(Call(tuple(found["send"]), tuple(found["receive"]), True))

    for m in range(ahead):
        call(("receive", FORWARD, m))
        program.append(Pass(True, m, rank))
        call(("send", FORWARD, m))
    if steady:
        call(("receive", FORWARD, ahead))
    for m in range(steady):
        program.append(Pass(True, m + ahead, rank))
        call(("send", FORWARD, m + ahead), ("receive", BACKWARD, m))
        program.append(Pass(False, m, rank))
        more = [("receive", FORWARD, m + ahead + 1)] if m < steady - 1 else []
        call(("send", BACKWARD, m), *more)
    for m in range(steady, num_microbatches):
        call(("receive", BACKWARD, m))
        program.append(Pass(False, m, rank))
        call(("send", BACKWARD, m))
    return program
