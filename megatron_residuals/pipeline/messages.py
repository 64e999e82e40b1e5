# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What crosses a stage boundary, by name: one payload, or its gradient, of one micro-batch."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from megatron_residuals.pipeline.layout import StageLayout

Direction: TypeAlias = Literal["forward", "backward"]
Verb: TypeAlias = Literal["send", "receive"]
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
SEND: Final = "send"
RECEIVE: Final = "receive"
DIRECTIONS: tuple[Direction, ...] = (FORWARD, BACKWARD)


class Message(NamedTuple):
    """One hop of one micro-batch; the boundary is named by the stage behind it, as in a plan."""

    direction: Direction
    boundary: int
    micro_batch: int

    def ends(self, layout: StageLayout) -> tuple[int, int]:
        """The ranks that send and receive it."""
        behind, ahead = layout.rank(self.boundary - 1), layout.rank(self.boundary)
        return (behind, ahead) if self.direction == FORWARD else (ahead, behind)

    def __str__(self) -> str:
        stages = (self.boundary - 1, self.boundary)
        source, target = stages if self.direction == FORWARD else reversed(stages)
        hop = f"stages {source} -> {target}"
        return f"{self.direction} message of micro-batch {self.micro_batch}, {hop}"
