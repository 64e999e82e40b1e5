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
from megatron_residuals.transport.late import Inbox
from megatron_residuals.transport.wire import Parcel, open_wire


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
