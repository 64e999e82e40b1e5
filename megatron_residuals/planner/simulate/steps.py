# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What one pipeline rank does in a step, as data: passes, communicator calls and waits.

Pass(True, 0, 2)                    forward of micro-batch 0 through stage 2
Call(sends, receives, True)         one call of the host's communicator that returns when all
                                    of its messages have arrived
Call(sends, receives, False)        one that returns at once and hands out handles
Wait("receive", message)            waits for such a handle
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from megatron_residuals.pipeline.messages import RECEIVE, SEND, Message, Verb
from megatron_residuals.pipeline.schedule import Pass


class Call(NamedTuple):
    """One communicator call: what it sends and receives, and whether it waits for all of it."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    blocking: bool

    @property
    def handles(self) -> list[tuple[Verb, Message]]:
        """Everything that can be waited for."""
        return [(SEND, m) for m in self.sends] + [(RECEIVE, m) for m in self.receives]


class Wait(NamedTuple):
    """Waits until a message that an earlier call started has been sent, or has arrived."""

    verb: Verb
    message: Message


Step: TypeAlias = "Pass | Call | Wait"
Program: TypeAlias = "list[Step]"
