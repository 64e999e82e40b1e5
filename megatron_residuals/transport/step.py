# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a rank has under way in one step: one object, made anew for each.

So nothing of a step that raised, or only ran forward, is left in the next one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from megatron_residuals.pipeline.messages import Direction, Message
from megatron_residuals.transport.late import Inbox, Outbox
from megatron_residuals.transport.message_order import MessageOrder, Walk
from megatron_residuals.transport.source_cache import SourceCache


@dataclass(eq=False)
class PipelineStep:
    """One step of one model on one rank.

    Attributes:
        received: bytes that arrived by (direction, boundary), the boundary named by the stage
            behind it.
        forwards: micro-batches that have entered each stage.
        agreed: whether the neighbours mean the same step.
    """

    walk: Walk
    order: MessageOrder
    cache: SourceCache = field(default_factory=SourceCache)
    outbox: Outbox = field(default_factory=Outbox)
    inbox: Inbox = field(default_factory=Inbox)
    received: Counter[tuple[Direction, int]] = field(default_factory=Counter)
    forwards: Counter[int] = field(default_factory=Counter)
    agreed: bool = False

    def count(self, message: Message, payload: Tensor) -> None:
        """Count the bytes of a payload that arrived, or is about to."""
        self.received[message.direction, message.boundary] += payload.nbytes

    def next_micro_batch(self, stage: int) -> int:
        """Index, within the step, of the micro-batch that enters a stage.

        Every stage sees the micro-batches of a step in the same order, whatever the schedule.
        """
        self.forwards[stage] += 1
        return self.forwards[stage] - 1
