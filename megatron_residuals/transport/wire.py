# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages between neighbouring pipeline ranks, one process group per direction.

Forward and backward messages never share a group: at two ranks both directions have the same peer,
and messages of unequal width that cross on one group are matched wrongly. At two ranks the groups
are split once more by sender, because the wrap-around hop of interleaved schedules runs against the
ordinary one between the same two peers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_residuals.transport import preflight


@dataclass(frozen=True)
class Direction:
    """One direction of travel around the ring of pipeline ranks, seen from one rank."""

    name: str
    send_group: dist.ProcessGroup
    receive_group: dist.ProcessGroup
    destination: int  # global ranks
    source: int
    sends_first: bool

    def exchange(
        self, send: Tensor | None, receive: Tensor | None, *, batched: bool
    ) -> tuple[dist.Work | None, dist.Work | None]:
        """Start sending and receiving; handles of the send and of the receive.

        Even ranks post the send first, odd ranks the receive, so that two neighbours never both
        wait behind a send. ``batched`` posts both in one call per group.
        """
        if batched:
            return self._batched(send, receive)
        handles: dict[str, dist.Work | None] = {"send": None, "receive": None}
        for verb in ("send", "receive") if self.sends_first else ("receive", "send"):
            if verb == "send" and send is not None:
                handles["send"] = dist.isend(send, self.destination, group=self.send_group)
            if verb == "receive" and receive is not None:
                handles["receive"] = dist.irecv(receive, self.source, group=self.receive_group)
        return handles["send"], handles["receive"]

    def _batched(
        self, send: Tensor | None, receive: Tensor | None
    ) -> tuple[dist.Work | None, dist.Work | None]:
        ops: dict[str, dist.P2POp] = {}
        if send is not None:
            ops["send"] = dist.P2POp(dist.isend, send, self.destination, self.send_group)
        if receive is not None:
            ops["receive"] = dist.P2POp(dist.irecv, receive, self.source, self.receive_group)
        if len(ops) == 2 and self.send_group is self.receive_group:
            works = dist.batch_isend_irecv(list(ops.values()))
            # one work for the whole batch (NCCL) or one per operation (gloo)
            return works[0], works[-1]
        works_by_verb = {verb: dist.batch_isend_irecv([op])[0] for verb, op in ops.items()}
        return works_by_verb.get("send"), works_by_verb.get("receive")


@dataclass(frozen=True)
class Wire:
    """Both directions of travel, and numbers for the models that use them."""

    forward: Direction
    backward: Direction
    serials: Iterator[int] = field(default_factory=itertools.count)


_wires: dict[tuple[int, ...], Wire] = {}
_world: dist.ProcessGroup | None = None


def open_wire(pp_group: dist.ProcessGroup) -> Wire:
    """The wire of a pipeline group, made on first use. Collective over all ranks of the world."""
    global _world
    if _world is not dist.group.WORLD:  # torch.distributed was shut down and started again
        _wires.clear()
        _world = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(pp_group))
    if members not in _wires:
        preflight.meet(len(_wires))
        _wires[members] = _make_wire(pp_group, members)
    return _wires[members]


def _make_wire(pp_group: dist.ProcessGroup, members: tuple[int, ...]) -> Wire:
    new_group = _group_maker(pp_group, members)
    size, rank = pp_group.size(), pp_group.rank()
    ahead, behind = (rank + 1) % size, (rank - 1) % size

    def direction(name: str, destination: int, source: int) -> Direction:
        of_even_senders = new_group()
        of_odd_senders = new_group() if size == 2 else of_even_senders
        groups = (of_even_senders, of_odd_senders)
        return Direction(
            name,
            send_group=groups[rank % 2],
            receive_group=groups[source % 2],
            destination=members[destination],
            source=members[source],
            sends_first=rank % 2 == 0,
        )

    return Wire(direction("forward", ahead, behind), direction("backward", behind, ahead))


def _group_maker(
    pp_group: dist.ProcessGroup, members: tuple[int, ...]
) -> Callable[[], dist.ProcessGroup]:
    """A function that makes one more process group over the members of every pipeline group.

    All ranks of the world have to name all new groups in the same order, so they first tell each
    other which pipeline groups there are.
    """
    gathered: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, members)
    every_group = sorted({ranks for ranks in gathered if ranks is not None})
    backend, timeout = dist.get_backend(pp_group), _timeout(pp_group)

    def new_group() -> dist.ProcessGroup:
        made = [
            dist.new_group(list(ranks), backend=backend, timeout=timeout) for ranks in every_group
        ]
        return made[every_group.index(members)]

    return new_group


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a process group, so that groups made beside it share it; None if unknown."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
