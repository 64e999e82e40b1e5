# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages between neighbouring pipeline ranks, one process group per direction.

Forward and backward messages never share a group: at two ranks both directions have the same peer,
and messages of unequal width that cross on one group are matched wrongly. At two ranks the groups
are split once more by sender, because the wrap-around hop of interleaved schedules runs against the
ordinary one between the same two peers.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_residuals.pipeline.messages import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    SEND,
    Direction,
    Message,
    Verb,
)
from megatron_residuals.transport import preflight
from megatron_residuals.versions import names_groups_alike


class Parcel(NamedTuple):
    """A tensor that is sent, or to be filled, and the message that it belongs to."""

    message: Message
    tensor: Tensor


class Delivery:
    """The handle of a parcel under way: waits for it, or says which message did not come."""

    def __init__(self, work: dist.Work, verb: Verb, message: Message, peer: int) -> None:
        self._work, self._what = work, (verb, message, peer)

    def is_completed(self) -> bool:
        """Whether waiting would return at once."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait for it; with NCCL, have the current stream wait.

        Raises:
            RuntimeError: the time of the process group is over, or the connection broke.
        """
        with _named(*self._what):
            self._work.wait()


@contextlib.contextmanager
def _named(verb: Verb, message: Message, peer: int) -> Iterator[None]:
    """Errors of the transport name the message and the rank at its other end."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not {verb} the {message}, "
            f"{'to' if verb == SEND else 'from'} rank {peer}: that rank has ended, is stopped, or "
            f"waits for something else; look at its output first. The transport says: {error}"
        ) from error


@dataclass(frozen=True)
class Lane:
    """One direction of travel around the ring of pipeline ranks, seen from one rank."""

    direction: Direction
    send_group: dist.ProcessGroup
    receive_group: dist.ProcessGroup
    destination: int  # global ranks
    source: int
    sends_first: bool

    def exchange(
        self, send: Parcel | None, receive: Parcel | None, *, batched: bool
    ) -> tuple[Delivery | None, Delivery | None]:
        """Start sending and receiving; handles of the send and of the receive.

        Even ranks post the send first, odd ranks the receive, so that two neighbours never both
        wait behind a send. ``batched`` posts both in one call per group.

        Raises:
            RuntimeError: the connection broke.
        """
        if batched and send and receive and self.send_group is self.receive_group:
            with _named(SEND, send.message, self.destination):
                works = dist.batch_isend_irecv([self._op(SEND, send), self._op(RECEIVE, receive)])
            # one work for the whole batch (NCCL) or one per operation (gloo)
            return self._delivery(SEND, send, works[0]), self._delivery(RECEIVE, receive, works[-1])
        parcels: dict[Verb, Parcel | None] = {SEND: send, RECEIVE: receive}
        started: dict[Verb, Delivery] = {}
        for verb in (SEND, RECEIVE) if self.sends_first else (RECEIVE, SEND):
            parcel = parcels[verb]
            if parcel is not None:
                started[verb] = self.start(verb, parcel, batched=batched)
        return started.get(SEND), started.get(RECEIVE)

    def start(self, verb: Verb, parcel: Parcel, *, batched: bool = False) -> Delivery:
        """Start one half of an exchange."""
        with _named(verb, parcel.message, self._peer(verb)):
            work: dist.Work | None
            if batched:
                (work,) = dist.batch_isend_irecv([self._op(verb, parcel)])
            elif verb == SEND:
                work = dist.isend(parcel.tensor, self.destination, group=self.send_group)
            else:
                work = dist.irecv(parcel.tensor, self.source, group=self.receive_group)
        return self._delivery(verb, parcel, work)

    def _op(self, verb: Verb, parcel: Parcel) -> dist.P2POp:
        if verb == SEND:
            return dist.P2POp(dist.isend, parcel.tensor, self.destination, self.send_group)
        return dist.P2POp(dist.irecv, parcel.tensor, self.source, self.receive_group)

    def _delivery(self, verb: Verb, parcel: Parcel, work: dist.Work | None) -> Delivery:
        assert work is not None, "a rank outside the group has no lane"
        return Delivery(work, verb, parcel.message, self._peer(verb))

    def _peer(self, verb: Verb) -> int:
        return self.destination if verb == SEND else self.source


class NewGroup(Protocol):
    """What makes a process group: ``torch.distributed.new_group``, or the host's form of it."""

    def __call__(
        self,
        ranks: list[int],
        *,
        timeout: timedelta | None,
        backend: str,
        use_local_synchronization: bool,
        group_desc: str,
    ) -> dist.ProcessGroup:
        """The group of some ranks; called by these alone if it is synchronized locally."""
        ...


@dataclass(frozen=True)
class Wire:
    """Both directions of travel, and numbers for the models that use them.

    Attributes:
        name: on all ranks of the pipeline the same, and of no other wire of the world.
    """

    name: str
    forward: Lane
    backward: Lane
    serials: Iterator[int] = field(default_factory=itertools.count)


# Process groups are made once for a pipeline and live as long as torch.distributed's own; keyed by
# the group of the world, which is another one after torch.distributed was started again.
_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Wire]]
_wires = weakref.WeakKeyDictionary()


_new_group = cast(NewGroup, dist.new_group)  # of its members an object, of other ranks a number


def world() -> dist.ProcessGroup:
    """The group of all ranks, of the torch.distributed that runs now."""
    assert dist.group.WORLD is not None, "torch.distributed runs"
    return dist.group.WORLD


def open_wire(pp_group: dist.ProcessGroup, new_group: NewGroup = _new_group) -> Wire:
    """The wire of a pipeline group, made on first use. Collective over all ranks of the world.

    Args:
        new_group: makes its process groups; the host's own way, where it keeps a list of them.

    Raises:
        RuntimeError: some ranks did not come within ten minutes; names them.
    """
    wires = _wires.setdefault(world(), {})
    members = tuple(dist.get_process_group_ranks(pp_group))
    if members not in wires:
        preflight.meet(len(wires))
        wires[members] = _make_wire(pp_group, members, new_group)
    return wires[members]


def _make_wire(pp_group: dist.ProcessGroup, members: tuple[int, ...], new_group: NewGroup) -> Wire:
    make = _group_maker(pp_group, members, new_group)
    size, rank = pp_group.size(), pp_group.rank()
    ahead, behind = (rank + 1) % size, (rank - 1) % size

    def groups(direction: Direction) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """What carries the messages of even and of odd senders."""
        description = f"RESIDUAL_{direction.upper()}"
        if size == 2:
            return make(f"{description}_OF_EVEN"), make(f"{description}_OF_ODD")
        return (make(description),) * 2

    def lane(
        direction: Direction, of_senders: Sequence[dist.ProcessGroup], destination: int, source: int
    ) -> Lane:
        return Lane(
            direction,
            send_group=of_senders[rank % 2],
            receive_group=of_senders[source % 2],
            destination=members[destination],
            source=members[source],
            sends_first=rank % 2 == 0,
        )

    forward, backward = groups(FORWARD), groups(BACKWARD)
    return Wire(
        forward[0].group_name,
        lane(FORWARD, forward, ahead, behind),
        lane(BACKWARD, backward, behind, ahead),
    )


def _group_maker(
    pp_group: dist.ProcessGroup, members: tuple[int, ...], new_group: NewGroup
) -> Callable[[str], dist.ProcessGroup]:
    """A function that makes one more process group over the members of a pipeline."""
    alone = _members_suffice()
    every_group = [members] if alone else _every_pipeline(members)
    backend, timeout = dist.get_backend(pp_group), _timeout(pp_group)

    def make(description: str) -> dist.ProcessGroup:
        made = [
            new_group(
                list(ranks),
                timeout=timeout,
                backend=backend,
                use_local_synchronization=alone,
                group_desc=description,
            )
            for ranks in every_group
        ]
        return made[every_group.index(members)]

    return make


def _members_suffice() -> bool:
    """Whether ranks can make a group without those that are not in it.

    Older releases of torch name such a group by the number of groups its maker is in, of which a
    first stage has more than a middle one. A world that is bound to a device splits its NCCL
    communicator for every group, which needs all of its ranks.
    """
    is_bound = world().bound_device_id is not None
    return names_groups_alike(torch.__version__) and not is_bound


def _every_pipeline(members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ranks of each pipeline group: what all have to name, in the same order."""
    gathered: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, members)
    return sorted({ranks for ranks in gathered if ranks is not None})


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a process group, so that groups made beside it share it; None if unknown."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
