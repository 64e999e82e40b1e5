# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Process groups that the host knows of, messages ahead of the first step, and a second attempt.

The host's in-process restart aborts what is under way, destroys the process groups, and calls the
training again, with a prefix of its own in the store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _get_default_store

from megatron_residuals.mcore.route import live_routes
from megatron_residuals.mcore.training import monitor
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import full_grads
from megatron_residuals.transport.wire import Lane

pytestmark = pytest.mark.host

RESIDUAL = "block_attnres(block_sublayers=3, transport='full'{})"
TOY = ToyGPT(pp=2, vpp=2)


def abort_a_step(toy: ToyGPT, spec: Any) -> ArithmeticError:
    """What a step raises, with a message under way; its traceback holds the model."""
    setup_parallel(toy)
    chunks = build_chunks(toy, spec)
    dist.barrier()  # a group that one rank destroys must be there on the other
    # the first rank in its second micro-batch, the other in its first: neither waits for the other
    entered = iter([dist.get_rank() == 1, True])

    def fail(*_: Any) -> None:
        if next(entered):
            raise ArithmeticError("a fault in the model")

    chunks[0].register_forward_pre_hook(fail)
    try:
        train_step(chunks, toy)
    except ArithmeticError as error:
        return error
    raise AssertionError("the step went through")


def start_again(iteration: int, store: dist.Store, rank: int) -> None:
    """What the host does between two attempts."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    store = dist.PrefixStore(str(iteration), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TOY.world_size)


def train_after_a_failure() -> ToyResult:
    spec = spec_for(RESIDUAL.format(", log_interval=1"))
    store, rank = _get_default_store(), dist.get_rank()
    dist.barrier()
    start_again(0, store, rank)
    failure = abort_a_step(TOY, spec)
    (aborted,) = live_routes()
    start_again(1, store, rank)
    assert live_routes() == [], f"{aborted} is alive in the traceback of {failure}"
    # collective, had it not noticed that the attempt is over
    assert rank == 0 or monitor.log_step(1) is None
    setup_parallel(TOY)
    chunks = build_chunks(TOY, spec)
    (route,) = live_routes()
    assert route is not aborted and route.wire is not aborted.wire
    return ToyResult(train_step(chunks, TOY), full_grads(chunks))


# A model that the traceback of its failure keeps alive once counted as one of the next attempt, and
# its monitor would have summed over ranks that no longer are.
def test_a_second_attempt_in_a_process_has_nothing_of_the_aborted_one() -> None:
    expected = run_toy(ToyGPT(), spec_for(RESIDUAL.format("")))
    actual = merge(run_ranks(2, train_after_a_failure, timeout_s=60))
    assert actual.losses == expected.losses
    for name, gradient in expected.grads.items():
        assert torch.equal(actual.grads[name], gradient), name


def messages_of_a_build(toy: ToyGPT, text: str) -> tuple[list[Any], ToyResult]:
    """Directions of the messages while a model is built, and a step after it."""
    setup_parallel(toy)
    stock, seen = Lane.exchange, []

    def exchange(lane: Lane, send: Any, receive: Any, *, batched: bool) -> Any:
        seen.append((lane.direction, send is not None, receive is not None, batched))
        return stock(lane, send, receive, batched=batched)

    Lane.exchange = exchange  # type: ignore[method-assign]
    chunks = build_chunks(toy, spec_for(text))
    Lane.exchange = stock  # type: ignore[method-assign]
    return seen, ToyResult(train_step(chunks, toy), full_grads(chunks))


def is_ours(group: dist.ProcessGroup | None) -> bool:
    return group is not None and group.group_desc.startswith("RESIDUAL_")


@pytest.mark.parametrize(
    ("toy", "first", "last"),
    [
        (TOY, [("forward", True, True, False), ("backward", True, True, False)], None),
        (
            ToyGPT(pp=2, config_overrides=dict(batch_p2p_comm=True)),
            [("forward", True, False, True), ("backward", False, True, True)],
            [("forward", False, True, True), ("backward", True, False, True)],
        ),
    ],
    ids=["interleaved", "1f1b, batched"],
)
def test_connecting_early_sends_over_every_hop_that_a_step_uses_and_changes_nothing(
    toy: ToyGPT, first: list[Any], last: list[Any] | None
) -> None:
    ranks = run_ranks(2, messages_of_a_build, toy, RESIDUAL.format(", connect_early=True"))
    assert [seen for seen, _ in ranks] == [first, last or first]
    expected = run_toy(ToyGPT(), spec_for(RESIDUAL.format("")))
    assert merge([result for _, result in ranks]).losses == expected.losses


def time_outs(toy: ToyGPT) -> list[tuple[str, timedelta]]:
    """Of our process groups, after the host has changed all that it knows of."""
    setup_parallel(toy)
    build_chunks(toy, spec_for(RESIDUAL.format("")))
    parallel_state.update_pg_timeout(timedelta(seconds=77))
    ours = [group for group in dist.distributed_c10d._world.pg_map if is_ours(group)]
    cpu = torch.device("cpu")
    return [(group.group_desc, group._get_backend(cpu).options._timeout) for group in ours]


# --distributed-timeout-seconds-after-init once left ours as they were.
def test_the_host_changes_the_time_outs_of_our_process_groups_with_its_own() -> None:
    after = timedelta(seconds=77)
    directions = ("FORWARD", "BACKWARD")
    expected = [
        (f"RESIDUAL_{way}_OF_{side}", after) for way in directions for side in ("EVEN", "ODD")
    ]
    assert run_ranks(2, time_outs, ToyGPT(pp=2)) == [expected] * 2
