# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The transport under less usual conditions: packing, headers, TP, more ranks, many steps."""

from __future__ import annotations

import functools
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_pipeline_model_parallel_group
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.communicator import ResidualP2PCommunicator
from megatron_residuals.mcore.route import live_routes
from megatron_residuals.mcore.spec import replace_residual
from megatron_residuals.testing import assert_close, run_ranks, toy_gpt
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
from megatron_residuals.testing.toy_weights import full_grads, named_globally

BLOCKS = "block_attnres(block_sublayers=3)"
FULL = "block_attnres(block_sublayers=3, transport='full')"
CHECKED = "block_attnres(block_sublayers=3, check_messages=True)"
FLOAT64 = dict(dtype=torch.float64)
INTERLEAVED = dict(pp=2, vpp=2)
SCHEDULES = {
    "overlapped": {},
    "freed": dict(deallocate_pipeline_outputs=True),
    "batched": dict(overlap_p2p_comm=False, batch_p2p_comm=True, deallocate_pipeline_outputs=True),
    "flushed": dict(overlap_p2p_comm_warmup_flush=True),
    "groups": dict(microbatch_group_size_per_vp_stage=3, deallocate_pipeline_outputs=True),
}


def assert_equal(actual: ToyResult, expected: ToyResult, dtype: torch.dtype, kind: str) -> None:
    losses = [torch.tensor(result.losses, dtype=dtype) for result in (actual, expected)]
    assert_close(*losses, dtype=dtype, kind=kind, name="losses")
    assert actual.grads.keys() == expected.grads.keys()
    for name, gradient in expected.grads.items():
        assert_close(actual.grads[name], gradient, dtype=dtype, kind=kind, name=name)


@functools.cache
def one_process(residual: str, **options: Any) -> ToyResult:
    return run_toy(ToyGPT(**options), spec_for(residual))


@pytest.mark.parametrize("name", ["overlapped", "batched", "groups"])
def test_messages_with_a_header_change_nothing(name: str) -> None:
    sizes = dict(num_microbatches=6, **FLOAT64)
    toy = ToyGPT(config_overrides=SCHEDULES[name], **sizes, **INTERLEAVED)
    expected = one_process(BLOCKS, **sizes)
    assert_equal(run_toy(toy, spec_for(CHECKED)), expected, torch.float64, "same_math")


# In groups of three a rank asks for several messages before it waits for the first: with a header
# posted for each, the second header was once given the payload of the first message.
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_varying_lengths_equal_one_process_in_every_schedule(schedule: dict[str, Any]) -> None:
    sizes = dict(seq_lengths=(16, 6, 12, 4, 2, 10), num_microbatches=6, **FLOAT64)
    toy = ToyGPT(config_overrides=schedule, **sizes, **INTERLEAVED)
    expected = one_process(BLOCKS, **sizes)
    assert_equal(run_toy(toy, spec_for(BLOCKS)), expected, torch.float64, "same_math")


MORE_RANKS = {
    "tp2-sp-pp2-vpp2": dict(tp=2, sequence_parallel=True, pp=2, vpp=2, num_microbatches=4),
    "pp4-vpp2-groups-of-5-and-4": dict(
        pp=4,
        vpp=2,
        num_microbatches=9,
        config_overrides=dict(
            microbatch_group_size_per_vp_stage=5, deallocate_pipeline_outputs=True
        ),
    ),
}


@pytest.mark.parametrize("layout", MORE_RANKS.values(), ids=MORE_RANKS)
def test_four_ranks_equal_one_process(layout: dict[str, Any]) -> None:
    sizes = dict(num_layers=8, hidden_size=16, seq_length=8, **FLOAT64)
    sizes["num_microbatches"] = layout["num_microbatches"]
    expected = run_toy(ToyGPT(**sizes), spec_for(BLOCKS))
    actual = run_toy(ToyGPT(**{**sizes, **layout}), spec_for(BLOCKS))
    assert_equal(actual, expected, torch.float64, "same_math")


@pytest.mark.parametrize(("residual", "kind"), [(FULL, "exact"), (BLOCKS, "same_math")])
def test_float32_with_eight_micro_batches_in_flight(residual: str, kind: str) -> None:
    sizes = dict(num_layers=8, hidden_size=16, seq_length=8, num_microbatches=8)
    expected = run_toy(ToyGPT(**sizes), spec_for(residual))
    actual = run_toy(ToyGPT(pp=4, vpp=2, **sizes), spec_for(residual))
    assert actual.losses == expected.losses
    assert_equal(actual, expected, torch.float32, kind)


# Rows per hop. The first layer opens the streams, the last contracts them.
STREAM_ROWS = {
    "first and last stage with layers": (dict(pp=2, vpp=2), "Et|t|t|tL", [3, 3, 3]),
    "stand-alone embedding and loss": (dict(pp=2, vpp=2), "E|tt|tt|L", [1, 3, 1]),
    "two stages after the last layer": (dict(pp=2, vpp=2), "Ett|tt||L", [3, 1, 1]),
    "an empty stage between, 1f1b": (dict(pp=4), "Ett||tt|L", [3, 3, 1]),
}


def received_bytes(toy: ToyGPT) -> tuple[ToyResult, dict[tuple[str, int], int]]:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for("mhc(streams=3)"))
    losses = train_step(chunks, toy)
    (route,) = live_routes()
    return ToyResult(losses, full_grads(chunks)), dict(route.step.received)


@pytest.mark.parametrize(("pipeline", "cut", "rows"), STREAM_ROWS.values(), ids=STREAM_ROWS)
def test_streams_cross_exactly_between_layers_and_as_one_row_outside(
    pipeline: dict[str, Any], cut: str, rows: list[int]
) -> None:
    toy = ToyGPT(config_overrides=dict(pipeline_model_parallel_layout=cut), **pipeline, **FLOAT64)
    ranks = run_ranks(toy.pp, received_bytes, toy)
    row_bytes = toy.seq_length * toy.micro_batch_size * toy.hidden_size * 8
    due = {
        (direction, stage): count * row_bytes * toy.num_microbatches
        for direction in ("forward", "backward")
        for stage, count in enumerate(rows, start=1)
    }
    assert {hop: size for _, sizes in ranks for hop, size in sizes.items()} == due
    assert sum(len(sizes) for _, sizes in ranks) == len(due)
    expected = one_process("mhc(streams=3)", **FLOAT64)
    assert_equal(merge([result for result, _ in ranks]), expected, torch.float64, "exact")


def living_after_steps(toy: ToyGPT, residual: str) -> list[tuple[int, ...]]:
    """Objects alive after steps two to six, an evaluation between the third and the fourth."""
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(residual))
    (route,) = live_routes()
    counts = []
    for step in range(1, 7):
        train_step(chunks, toy)
        if step == 3:
            with torch.no_grad():
                train_step(chunks, toy, forward_only=True)
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        # not counted: random states (bytes), of which torch keeps one more after every step
        tensors = [tensor for tensor in tensors if tensor.dtype != torch.uint8]
        elements = sum(tensor.numel() for tensor in tensors)
        counts.append((len(route.step.cache), len(route.step.outbox), len(tensors), elements))
    return counts[1:]


@pytest.mark.parametrize("residual", [BLOCKS, CHECKED, "mhc()"])
def test_nothing_grows_from_step_to_step(residual: str) -> None:
    toy = ToyGPT(seq_length=4, hidden_size=16, num_microbatches=2, **INTERLEAVED)
    for counts in run_ranks(2, living_after_steps, toy, residual):
        assert counts[0][:2] == (0, 0)
        assert len(set(counts)) == 1


def raise_in_the_middle(toy: ToyGPT, last_calls: tuple[int, ...]) -> tuple[ToyResult, int]:
    """A good step, one in which every rank raises, a good one; and what the cache held between."""
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))
    (route,) = live_routes()
    train_step(chunks, toy)
    calls = itertools.count(1)
    forwards = [chunk.forward for chunk in chunks]

    def failing(forward: Any, *args: Any) -> torch.Tensor:
        if next(calls) == last_calls[torch.distributed.get_rank()]:
            raise ConnectionError("the data loader lost its server")
        return forward(*args)

    for chunk, forward in zip(chunks, forwards, strict=True):
        chunk.forward = functools.partial(failing, forward)
    with pytest.raises(ConnectionError):
        train_step(chunks, toy)
    for chunk, forward in zip(chunks, forwards, strict=True):
        chunk.forward = forward
    left = len(route.step.cache)
    losses = train_step(chunks, toy)
    return ToyResult(losses, full_grads(chunks)), left


# The second rank raises one forward earlier than the first: then every message that was sent has
# arrived, without which no schedule of the host can go on.
@pytest.mark.parametrize(
    ("pipeline", "last_calls", "cached"),
    [(dict(pp=2), (3, 2), False), (INTERLEAVED, (4, 3), True)],
    ids=["1f1b", "interleaved"],
)
def test_the_step_after_an_exception_on_every_rank_is_as_if_there_had_been_none(
    pipeline: dict[str, Any], last_calls: tuple[int, ...], cached: bool
) -> None:
    ranks = run_ranks(2, raise_in_the_middle, ToyGPT(**pipeline, **FLOAT64), last_calls)
    assert any(left for _, left in ranks) == cached
    actual = merge([result for result, _ in ranks])
    assert_equal(actual, one_process(BLOCKS, **FLOAT64), torch.float64, "same_math")


def freeze_below(toy: ToyGPT, residual: str, first_trained: int) -> ToyResult:
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(residual))
    for chunk in chunks:
        for name, parameter in named_globally(chunk):
            layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            frozen = "embedding" in name or (layer and int(layer[1]) < first_trained)
            parameter.requires_grad_(not frozen)
    losses = train_step(chunks, toy)
    return ToyResult(losses, full_grads(chunks))


@pytest.mark.parametrize("residual", [BLOCKS, "mhc()"])
@pytest.mark.parametrize("pipeline", [dict(pp=2), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_stages_without_any_trained_parameter_are_a_normal_case(
    pipeline: dict[str, Any], residual: str
) -> None:
    (expected,) = run_ranks(1, freeze_below, ToyGPT(**FLOAT64), residual, 2)
    toy = ToyGPT(**pipeline, **FLOAT64)
    actual = merge(run_ranks(2, freeze_below, toy, residual, 2))
    assert not any("embedding" in name for name in actual.grads)
    assert_equal(actual, expected, torch.float64, "same_math")


def models_in_turns(toy: ToyGPT) -> dict[str, ToyResult]:
    setup_parallel(toy)
    models = {text: build_chunks(toy, spec_for(text)) for text in (BLOCKS, "mhc()")}
    assert len(live_routes()) == len(models)
    for chunks in models.values():
        train_step(chunks, toy)
    results = {}
    for text, chunks in models.items():
        losses = train_step(chunks, toy)
        results[text] = ToyResult(losses, full_grads(chunks))
    del models, chunks
    gc.collect()
    assert live_routes() == [], "a model that is gone left its route behind"
    return results


def test_models_side_by_side_do_not_disturb_each_other_and_leave_nothing() -> None:
    toy = ToyGPT(seq_length=4, hidden_size=16, **INTERLEAVED)
    ranks = run_ranks(2, models_in_turns, toy)
    for residual in ranks[0]:
        together = merge([results[residual] for results in ranks])
        assert_equal(together, run_toy(toy, spec_for(residual)), torch.float32, "exact")


def own_communicators(toy: ToyGPT, longer: ToyGPT) -> list[ToyResult]:
    """Steps of two lengths with one communicator, between them an evaluation with another."""
    setup_parallel(toy)
    chunks = build_chunks(toy, spec_for(BLOCKS))

    def step(communicator: Any, toy: ToyGPT, **options: Any) -> ToyResult:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        schedule = get_forward_backward_func()
        toy_gpt.get_forward_backward_func = lambda: functools.partial(
            schedule, p2p_communicator=communicator, pg_collection=groups
        )
        return ToyResult(train_step(chunks, toy, **options), full_grads(chunks))

    training, evaluating = (
        ResidualP2PCommunicator(get_pipeline_model_parallel_group(), chunks[0].config)
        for _ in range(2)
    )
    first = step(training, toy)
    with torch.no_grad():
        step(evaluating, longer, forward_only=True)
    return [first, step(training, longer), step(training, toy)]


# An interleaved step was once announced to the communicator made last, whichever it used.
@pytest.mark.parametrize("pipeline", [dict(pp=2), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_a_communicator_of_the_caller_s_own_serves_any_number_of_steps(
    pipeline: dict[str, Any],
) -> None:
    toy, longer = (ToyGPT(num_microbatches=n, **pipeline, **FLOAT64) for n in (4, 6))
    ranks = run_ranks(2, own_communicators, toy, longer)
    for index, count in enumerate((4, 6, 4)):
        expected = one_process(BLOCKS, num_microbatches=count, **FLOAT64)
        actual = merge([results[index] for results in ranks])
        assert_equal(actual, expected, torch.float64, "same_math")


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack, [t, heads, d]; the host's needs TE."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> torch.Tensor:
        ends = packed_seq_params.cu_seqlens_q[1:]
        positions = torch.arange(query.shape[0])
        sequence = (positions[:, None] >= ends).sum(-1)
        visible = (sequence[:, None] == sequence) & (positions[:, None] >= positions)
        heads = (tensor.transpose(0, 1) for tensor in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
        return mixed.transpose(0, 1).flatten(1)


def packed_spec(residual: str) -> Callable[[Any, int | None], Any]:
    def spec(config: Any, vp_stage: int | None) -> Any:
        base = get_gpt_layer_local_spec()
        base.submodules.self_attention.submodules.core_attention = PackedAttention
        return replace_residual(base, ResidualConfig.parse(residual))

    return spec


PACKS = ((5, 7), (3, 4), (10,), (2, 2, 2))
WHOLE = ((12,), (7,), (10,), (6,))


def packed_step(batches: Iterator[tuple[torch.Tensor, tuple[int, ...]]], model: Any) -> Any:
    tokens, lengths = next(batches)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    output = model(tokens[:, :-1], positions, None, packed_seq_params=packed)

    def loss_function(logits: torch.Tensor) -> Any:
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss, {"loss": loss.detach().clone()}

    return output, loss_function


def train_packed(toy: ToyGPT, residual: str, packs: tuple[tuple[int, ...], ...]) -> ToyResult:
    setup_parallel(toy)
    chunks = build_chunks(toy, packed_spec(residual))
    generator = torch.Generator().manual_seed(0)
    tokens = [
        torch.randint(toy.vocab_size, (1, length + 1), generator=generator)
        for length in toy.lengths
    ]
    iterators = [iter(zip(tokens, packs, strict=True)) for _ in chunks]
    store = get_forward_backward_func()(
        forward_step_func=packed_step,
        data_iterator=iterators if toy.vpp else iterators[0],
        model=chunks if toy.vpp else chunks[0],
        num_microbatches=len(packs),
        seq_length=max(toy.lengths),
        micro_batch_size=1,
        forward_only=False,
    )
    return ToyResult([entry["loss"].item() for entry in store], full_grads(chunks))


@pytest.mark.parametrize(
    ("residual", "pipeline"),
    [(BLOCKS, INTERLEAVED), (FULL, INTERLEAVED), ("mhc()", INTERLEAVED), (BLOCKS, dict(pp=2))],
    ids=str,
)
def test_packed_sequences_equal_one_process(residual: str, pipeline: dict[str, Any]) -> None:
    sizes = dict(seq_lengths=tuple(map(sum, PACKS)), micro_batch_size=1, **FLOAT64)
    (expected,) = run_ranks(1, train_packed, ToyGPT(**sizes), residual, PACKS)
    (unpacked,) = run_ranks(1, train_packed, ToyGPT(**sizes), residual, WHOLE)
    assert expected.losses[2] == unpacked.losses[2]  # the micro-batch with one sequence
    assert len({*expected.losses, *unpacked.losses}) == 7
    actual = merge(run_ranks(2, train_packed, ToyGPT(**sizes, **pipeline), residual, PACKS))
    assert_equal(actual, expected, torch.float64, "same_math")
