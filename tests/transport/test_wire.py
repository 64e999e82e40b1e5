# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Process groups of a wire, and what a message says that does not come. No Megatron is built."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_residuals.pipeline.messages import BACKWARD, FORWARD, RECEIVE, Message
from megatron_residuals.testing import RankFailure, run_ranks
from megatron_residuals.transport import preflight, wire
from megatron_residuals.transport.late import Inbox
from megatron_residuals.transport.wire import Parcel, open_wire
from megatron_residuals.versions import names_groups_alike


def groups_of_lanes() -> list[tuple[str, int, str, int]]:
    """Of both lanes: group and rank to send to, group and rank to receive from."""
    wire = open_wire(dist.group.WORLD)
    assert open_wire(dist.group.WORLD) is wire
    return [
        (lane.send_group.group_name, lane.destination, lane.receive_group.group_name, lane.source)
        for lane in (wire.forward, wire.backward)
    ]


# At two ranks the wrap-around hop of an interleaved schedule runs against the ordinary one between
# the same peers. That the groups are split by sender was once checked by nothing: messages cross
# too rarely for a run to show it.
@pytest.mark.parametrize(("num_ranks", "num_groups"), [(2, 4), (3, 2)])
def test_directions_share_no_group_and_at_two_ranks_senders_do_not_either(
    num_ranks: int, num_groups: int
) -> None:
    ranks = run_ranks(num_ranks, groups_of_lanes)
    carried: dict[str, set[tuple[int, int]]] = {}
    for lane, step in ((0, 1), (1, -1)):
        for rank, lanes in enumerate(ranks):
            group, destination, _, source = lanes[lane]
            assert destination == (rank + step) % num_ranks
            assert source == (rank - step) % num_ranks
            assert ranks[destination][lane][2] == group, "sender and receiver use another group"
            carried.setdefault(group, set()).add((rank, destination))
    assert len(carried) == num_groups
    if num_ranks == 2:
        assert all(len(hops) == 1 for hops in carried.values())


class CountedStore:
    """A store of which the other ranks have asked already what this one is about to ask."""

    def __init__(self, others: int) -> None:
        self._store, self._others, self.calls = dist.HashStore(), others, []

    def add(self, key: str, amount: int) -> int:
        self.calls.append("add")
        return self._others + amount

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._store, name)


def calls_to_open_a_wire(
    world: int, pp: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[tuple[list[int], bool, str]]]:
    """What a rank of a world asks of the store, and the groups that it names."""
    store, named = CountedStore(world - 1), []

    def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        local, description = options["use_local_synchronization"], options["group_desc"]
        named.append((ranks, local, description))
        return dist.new_group(ranks, **options)

    def gather(gathered: list[Any], members: tuple[int, ...]) -> None:
        store.calls.append("all_gather_object")
        apart = world // pp
        gathered[:] = [tuple(range(rank % apart, world, apart)) for rank in range(world)]

    monkeypatch.setattr(preflight, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    dist.init_process_group("fake", rank=0, world_size=world, store=dist.HashStore())
    try:
        open_wire(dist.new_group(range(0, world, world // pp)), new_group)
    finally:
        dist.destroy_process_group()
    return store.calls, named


# Every rank once named the groups of all pipelines, 512 of them in a world of 4,096, behind a
# gathering over that world.
@pytest.mark.skipif(not names_groups_alike(torch.__version__), reason="all ranks name all groups")
def test_a_rank_of_4096_names_no_more_groups_than_one_of_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for world, pp in ((8, 4), (8, 2), (128, 4), (512, 8), (2048, 16), (4096, 16), (4096, 2)):
        asked, named = calls_to_open_a_wire(world, pp, monkeypatch)
        assert asked == ["set", "add", "set", "wait"]
        assert len(named) == (4 if pp == 2 else 2)
        assert len({description for *_, description in named}) == len(named)
        mine = list(range(0, world, world // pp))
        assert all(ranks == mine and local for ranks, local, _ in named)


# A communicator of NCCL that is split from the world's, and names of older releases of torch, need
# every rank of the world.
def test_where_members_do_not_suffice_all_ranks_name_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "names_groups_alike", lambda version: False)
    asked, named = calls_to_open_a_wire(8, 4, monkeypatch)
    assert asked[-1] == "all_gather_object"
    assert [(ranks, local) for ranks, local, _ in named] == [
        ([0, 2, 4, 6], False),
        ([1, 3, 5, 7], False),
    ] * 2


def wait_for_a_stopped_neighbour(late: bool) -> str:
    """Rank 1 never sends, as if it was stopped; what rank 0 says of that."""
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(seconds=1))
    lane = open_wire(group).backward
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"], timedelta(seconds=30))
        return ""
    message = Message(BACKWARD, 3, 5)
    with pytest.raises(RuntimeError) as failure:
        if late:
            Inbox().expect(lane, message, torch.empty(0), lambda *_: None).wait()
        else:
            lane.start(RECEIVE, Parcel(message, torch.empty(4))).wait()
    store.set("rank 0 has given up", "")
    return str(failure.value)


# It once said "Timed out waiting 1000ms for recv operation to complete" and nothing of ours.
@pytest.mark.parametrize("late", [False, True], ids=["plain", "with a header"])
def test_a_message_that_does_not_come_in_time_is_named_with_the_rank_that_owes_it(
    late: bool,
) -> None:
    said, _ = run_ranks(2, wait_for_a_stopped_neighbour, late)
    owed = "rank 0 could not receive the backward message of micro-batch 5, stages 3 -> 2, from"
    assert said.startswith(f"{owed} rank 1: that rank has ended, is stopped")
    assert "Timed out waiting 1000ms" in said


def die_while_the_neighbour_waits(batched: bool) -> Any:
    lane = open_wire(dist.group.WORLD).forward
    parcel = Parcel(Message(FORWARD, 1, 0), torch.zeros(4))
    if dist.get_rank() == 0:
        sent, _ = lane.exchange(parcel, None, batched=batched)
        sent.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    for micro_batch in range(2):
        due = Parcel(Message(FORWARD, 1, micro_batch), torch.empty(4))
        _, received = lane.exchange(None, due, batched=batched)
        received.wait()


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_connection_that_closes_is_named_as_the_message_that_was_due(batched: bool) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, die_while_the_neighbour_waits, batched)
    owed = "rank 1 could not receive the forward message of micro-batch 1, stages 0 -> 1, from"
    assert f"RuntimeError: {owed} rank 0: that rank has ended" in str(failure.value)
