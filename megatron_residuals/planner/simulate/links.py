# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What carries a message from one pipeline rank to another, and how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_residuals.text import count_faults, raise_faults


@dataclass(frozen=True)
class Link:
    """A port of one GPU: bytes per second in each direction, and seconds until the first byte."""

    bytes_per_s: float
    latency_s: float


FREE = Link(math.inf, 0.0)


@dataclass(frozen=True)
class Network:
    """Pipeline ranks in nodes of ``ranks_per_node``; one kind of link inside, one between nodes.

    A GPU has one port of each kind. Messages that leave (arrive) through one port follow each
    other; leaving and arriving do not disturb each other.

    Raises:
        ValueError: a rate or a count is not above zero, or a latency is below.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        faults = count_faults(1, ranks_per_node=self.ranks_per_node)
        for name, link in (("inside", self.inside), ("between", self.between)):
            if not link.bytes_per_s > 0 or not link.latency_s >= 0:
                faults.append(
                    f"links {name} nodes have {link.bytes_per_s:g} bytes/s and a latency of "
                    f"{link.latency_s:g} s; give a rate above 0 and a latency of at least 0."
                )
        raise_faults("network", faults)

    def is_inside(self, sender: int, receiver: int) -> bool:
        """Whether two pipeline ranks are in one node."""
        return sender // self.ranks_per_node == receiver // self.ranks_per_node

    def link(self, sender: int, receiver: int) -> Link:
        """The link between two pipeline ranks."""
        return self.inside if self.is_inside(sender, receiver) else self.between


NO_COST = Network(FREE, FREE)
