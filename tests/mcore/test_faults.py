# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of a pipeline are caught where they happen and named, never computed with."""

from __future__ import annotations

import itertools
import os
import re
import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megatron_residuals.mcore.communicator import ResidualP2PCommunicator
from megatron_residuals.mcore.route import live_routes
from megatron_residuals.testing import RankFailure, assert_close, run_ranks, toy_gpt
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
    transformer_config,
)
from megatron_residuals.testing.toy_weights import full_grads
from megatron_residuals.transport import preflight
from megatron_residuals.transport.message_order import MessageOrder
from megatron_residuals.transport.source_cache import SourceCache

INTERLEAVED = ToyGPT(pp=2, vpp=2)
BLOCKS = "block_attnres(block_sublayers=1)"


def train(toy: ToyGPT, residual: str) -> list[float]:
    setup_parallel(toy)
    return train_step(build_chunks(toy, spec_for(residual)), toy)


def skip_a_deposit(toy: ToyGPT) -> None:
    deposit, skipped = SourceCache._deposit, []

    def lossy(cache: SourceCache, key: tuple[int, int], leaf: torch.Tensor) -> None:
        if key == (2, 1) and not skipped:
            skipped.append(key)
            return
        deposit(cache, key, leaf)

    SourceCache._deposit = lossy
    train(toy, BLOCKS)


def test_a_consumer_that_skips_its_backward_is_an_error_naming_micro_batch_and_source() -> None:
    with pytest.raises(RankFailure, match="micro-batch 2, source 1: 1 of its gradients"):
        run_ranks(2, skip_a_deposit, INTERLEAVED, timeout_s=20)


def plans_differ(toy: ToyGPT) -> None:
    rank = torch.distributed.get_rank()
    train(toy, f"block_attnres(block_sublayers={1 + rank})")


@pytest.mark.parametrize("toy", [ToyGPT(pp=2), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_neighbours_with_different_plans_both_refuse_before_anything_is_sent(toy: ToyGPT) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, plans_differ, toy, timeout_s=20)
    message = str(failure.value)
    assert message.count("neighbouring pipeline ranks disagree") == 2
    assert "hop into stage 1 (pipeline rank 1, chunk 0): rank 0 expects" in message
    assert "hop into stage 1 (pipeline rank 1, chunk 0): rank 1 expects" in message
    assert "block_sublayers=1" in message and "block_sublayers=2" in message


def one_rank_without_a_residual(toy: ToyGPT) -> None:
    preflight.PATIENCE = timedelta(seconds=1)
    setup_parallel(toy)
    stock = torch.distributed.get_rank() == 1
    train_step(build_chunks(toy, None if stock else spec_for(BLOCKS)), toy)


def test_a_rank_that_builds_the_stock_model_is_named_by_the_others() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[1\] did not build a model with a residual"):
        run_ranks(2, one_rank_without_a_residual, ToyGPT(pp=2), timeout_s=20)


def one_rank_with_the_stock_communicator(toy: ToyGPT) -> None:
    preflight.PATIENCE = timedelta(seconds=1)
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    if torch.distributed.get_rank() == 1:
        schedules.P2PCommunicator = ResidualP2PCommunicator.__bases__[0]
    train_step(chunks, toy)


def test_a_neighbour_that_is_never_asked_for_its_plan_is_named() -> None:
    with pytest.raises(
        RankFailure, match="pipeline rank 1 did not say within 0:00:01 how it begins a step"
    ):
        run_ranks(2, one_rank_with_the_stock_communicator, ToyGPT(pp=2), timeout_s=20)


def batches_differ(toy: ToyGPT) -> None:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for("mhc()"))
    schedule = schedules.forward_backward_pipelining_without_interleaving
    length = toy.seq_length + 2 * torch.distributed.get_rank()
    schedule(
        forward_step_func=None if torch.distributed.get_rank() else _first_stage,
        data_iterator=None,
        model=chunks,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=toy.micro_batch_size,
    )


def _first_stage(_: Any, model: torch.nn.Module) -> tuple[torch.Tensor, None]:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    return model(tokens, torch.arange(16).expand(2, -1), mask), None


def test_neighbours_with_different_payload_shapes_both_refuse() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, batches_differ, ToyGPT(pp=2), timeout_s=20)
    message = str(failure.value)
    assert message.count("row_shape: pipeline rank") == 2
    assert "[16, 2, 32]" in message and "[18, 2, 32]" in message


def options_differ(toy: ToyGPT, other: ToyGPT) -> None:
    """Two steps of the first toy on every rank, then one of the other on rank 1 alone."""
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    for _ in range(2):
        train_step(chunks, toy)
    if torch.distributed.get_rank() == 1:
        for chunk in chunks:
            vars(chunk.config).update(other.config_overrides)
        toy = other
    train_step(chunks, replace(toy, num_microbatches=toy.num_microbatches + 2))


ONE_SIDED = {
    "micro-batches, 1f1b": (dict(pp=2), dict(num_microbatches=6), "num_microbatches: .* 6, .* 8"),
    "micro-batches": (dict(pp=2, vpp=2), dict(num_microbatches=6), "num_microbatches: .* 6, .* 8"),
    "group": (
        dict(pp=2, vpp=2),
        dict(config_overrides=dict(microbatch_group_size_per_vp_stage=3)),
        "microbatch_group_size: .* 2, .* 3",
    ),
}


# The ranks once waited for each other until the time-out of the process group.
@pytest.mark.host
@pytest.mark.parametrize(("pipeline", "other", "fault"), ONE_SIDED.values(), ids=ONE_SIDED)
def test_a_step_that_one_rank_walks_in_another_way_is_refused_before_anything_is_sent(
    pipeline: dict[str, int], other: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, options_differ, ToyGPT(**pipeline), ToyGPT(**pipeline, **other), timeout_s=30)
    message = str(failure.value)
    assert message.count("nothing of this step was sent") == 2
    assert re.search(f"- {fault}", message)


def overlaps_differ(toy: ToyGPT, other: dict[str, Any]) -> ToyResult:
    if torch.distributed.get_rank() == 1:
        toy = replace(toy, config_overrides=other)
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    losses = train_step(chunks, toy)
    return ToyResult(losses, full_grads(chunks))


# Why these options are not compared: they change when a rank waits, not what it sends.
@pytest.mark.parametrize(
    "other",
    [
        dict(overlap_p2p_comm=False),
        dict(overlap_p2p_comm_warmup_flush=True),
        dict(deallocate_pipeline_outputs=True),
    ],
    ids=lambda options: next(iter(options)),
)
def test_neighbours_may_overlap_their_messages_in_different_ways(other: dict[str, Any]) -> None:
    expected = run_toy(INTERLEAVED, spec_for(BLOCKS))
    actual = merge(run_ranks(2, overlaps_differ, INTERLEAVED, other))
    assert actual.losses == expected.losses
    assert all(torch.equal(actual.grads[name], grad) for name, grad in expected.grads.items())


def die_in_the_second_forward(toy: ToyGPT, residual: str) -> None:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(residual))
    if torch.distributed.get_rank() == 1:
        calls = itertools.count(1)

        def die(*_: Any) -> None:
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        chunks[0].register_forward_pre_hook(die)
    train_step(chunks, toy)


# The rank that was left once had no more to say than "Connection closed by peer".
@pytest.mark.parametrize("toy", [ToyGPT(pp=2), INTERLEAVED], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize("residual", [BLOCKS, "block_attnres(check_messages=True)"])
def test_a_rank_that_dies_is_named_by_its_neighbour_with_the_message_that_was_due(
    toy: ToyGPT, residual: str
) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, die_in_the_second_forward, toy, residual, timeout_s=20)
    assert re.search(
        r"RuntimeError: rank 0 could not (send|receive) the (forward|backward) message of "
        r"micro-batch \d, stages \d -> \d, (to|from) rank 1: that rank has ended",
        str(failure.value),
    )


def swap_two_messages(toy: ToyGPT) -> None:
    order_next, held = MessageOrder.next, []

    def swapped(order: MessageOrder, direction: str, verb: str) -> Any:
        message = order_next(order, direction, verb)
        if (direction, verb) == ("forward", "send") and not held:
            held.append(message)
            return message._replace(micro_batch=message.micro_batch + 1)
        return message

    MessageOrder.next = swapped
    train(toy, "block_attnres(check_messages=True)")


@pytest.mark.parametrize("toy", [ToyGPT(pp=2), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_a_swapped_message_is_caught_before_anything_is_computed_with_it(toy: ToyGPT) -> None:
    with pytest.raises(RankFailure, match="due is the forward message of micro-batch 0") as failure:
        run_ranks(2, swap_two_messages, toy, timeout_s=20)
    assert "arrived is the forward message of micro-batch 1" in str(failure.value)


def stock_communicator(toy: ToyGPT) -> None:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for("block_attnres(block_sublayers=1)"))
    schedules.P2PCommunicator = ResidualP2PCommunicator.__bases__[0]
    train_step(chunks, toy)


def test_a_pipeline_without_our_communicator_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(RankFailure, match="the pipeline runs without ResidualP2PCommunicator"):
        run_ranks(2, stock_communicator, ToyGPT(pp=2), timeout_s=20)


def models_of_one_config(toy: ToyGPT, *residuals: str) -> list[ToyResult]:
    setup_parallel(toy)
    config = transformer_config(toy)
    toy_gpt.transformer_config = lambda _: config
    models = [build_chunks(toy, spec_for(residual)) for residual in residuals]
    return [ToyResult(train_step(chunks, toy), full_grads(chunks)) for chunks in models]


def test_models_without_a_pipeline_may_share_a_config() -> None:
    (results,) = run_ranks(1, models_of_one_config, ToyGPT(), BLOCKS, "mhc()", BLOCKS)
    for residual, result in zip((BLOCKS, "mhc()", BLOCKS), results, strict=True):
        expected = run_toy(ToyGPT(), spec_for(residual))
        assert result.losses == expected.losses
        assert all(torch.equal(result.grads[name], grad) for name, grad in expected.grads.items())


def test_models_of_a_pipeline_that_share_a_config_but_no_residual_are_refused() -> None:
    with pytest.raises(RankFailure, match="another model a TransformerConfig of its own"):
        run_ranks(2, models_of_one_config, ToyGPT(pp=2), BLOCKS, "mhc()", timeout_s=20)


def mixed_steps(toy: ToyGPT) -> tuple[ToyResult, list[list[float]]]:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    (route,) = live_routes()
    losses = []
    for forward_only, grad in ((True, False), (False, True), (True, False), (True, True)):
        with torch.set_grad_enabled(grad):
            losses.append(train_step(chunks, toy, forward_only=forward_only))
        # a forward-only pass that keeps its graph holds no value either, only what is owed
        assert route.step.cache.num_values == 0
        assert len(route.step.cache) == 0 or (forward_only and grad)
    losses.append(train_step(chunks, toy))
    assert len(route.step.cache) == 0
    return ToyResult(losses[-1], full_grads(chunks)), losses


def test_evaluation_between_steps_leaves_nothing_behind_and_changes_nothing() -> None:
    results = run_ranks(2, mixed_steps, INTERLEAVED)
    expected = run_toy(INTERLEAVED, spec_for(BLOCKS))
    merged = merge([result for result, _ in results])
    assert merged.losses == expected.losses
    assert all(torch.equal(merged.grads[name], grad) for name, grad in expected.grads.items())
    assert all(len(set(map(tuple, losses))) == 1 for _, losses in results)


def after_a_step_that_raised(toy: ToyGPT) -> ToyResult:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    (route,) = live_routes()
    train_step(chunks, toy)
    for source in range(2):  # what a step that raised in its middle leaves
        leftover = torch.randn(2, 2, 2, requires_grad=True)
        route.step.cache.stash(0, source, leftover, fetches=1)
    route.next_micro_batch(0)
    losses = train_step(chunks, toy)
    assert len(route.step.cache) == 0
    return ToyResult(losses, full_grads(chunks))


def test_a_step_after_one_that_raised_starts_clean() -> None:
    merged = merge(run_ranks(2, after_a_step_that_raised, INTERLEAVED))
    expected = run_toy(INTERLEAVED, spec_for(BLOCKS))
    assert merged.losses == expected.losses
    assert all(torch.equal(merged.grads[name], grad) for name, grad in expected.grads.items())


def frozen_embedding(toy: ToyGPT) -> ToyResult:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            # adapters-only style: of the host's weights only the MLP's second matrices train
            parameter.requires_grad_("linear_fc2" in name)
    losses = train_step(chunks, toy)
    return ToyResult(losses, full_grads(chunks))


@pytest.mark.parametrize("layout", [dict(pp=2), dict(pp=2, vpp=2), dict(pp=4)], ids=str)
def test_frozen_parts_of_the_model_are_a_normal_case(layout: dict[str, int]) -> None:
    (expected,) = run_ranks(1, frozen_embedding, ToyGPT(dtype=torch.float64))
    toy = ToyGPT(dtype=torch.float64, **layout)
    actual = merge(run_ranks(toy.world_size, frozen_embedding, toy))
    assert actual.losses == expected.losses
    assert actual.grads.keys() == expected.grads.keys()
    for name, gradient in expected.grads.items():
        assert gradient.abs().max() > 0
        assert_close(actual.grads[name], gradient, dtype=torch.float64, kind="same_math", name=name)


@pytest.mark.parametrize(
    "residual", ["mhc(streams=3)", BLOCKS, BLOCKS.replace(")", ", transport='full')")]
)
@pytest.mark.parametrize("layout", [dict(pp=2), dict(pp=2, vpp=2), dict(pp=4)], ids=str)
def test_micro_batches_of_varying_length_equal_one_process(
    residual: str, layout: dict[str, int]
) -> None:
    lengths = (16, 6, 12, 4)
    expected = run_toy(ToyGPT(dtype=torch.float64, seq_lengths=lengths), spec_for(residual))
    toy = ToyGPT(dtype=torch.float64, seq_lengths=lengths, **layout)
    actual = run_toy(toy, spec_for(residual), timeout_s=30)
    assert actual.losses == expected.losses
    for name, gradient in expected.grads.items():
        assert_close(actual.grads[name], gradient, dtype=torch.float64, kind="same_math", name=name)
