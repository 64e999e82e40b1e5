# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Recorded steps: against sums over everything that passed, and the same on every layout."""

from __future__ import annotations

import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.records import Record
from megatron_residuals.mcore.training import monitor
from megatron_residuals.mechanisms.sources import Sources
from megatron_residuals.mechanisms.streams import Streams
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.testing import toy_gpt
from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, build_chunks, setup_parallel, train_step
from megatron_residuals.testing.toy_weights import default_initialise
from tests.mcore.training.everything import (
    Everything,
    composites,
    rms,
    source_figures,
    stream_figures,
)

pytestmark = [pytest.mark.host, pytest.mark.timeout(200)]

SPECS = {
    "residual": "residual(log_interval=1)",
    "hc": "hc(log_interval=1)",
    "mhc": "mhc(mhc_sinkhorn_iterations=2, log_interval=1)",
    "dsv4": "mhc(mhc_convention='dsv4', streams=3, log_interval=1)",
    "attnres": "attnres(log_interval=1)",
    "block_attnres": "block_attnres(block_sublayers=3, log_interval=1)",
}
# What depends on the layout of the ranks, and is checked apart.
OF_THE_LAYOUT = {"residual/bytes_forward", "residual/bytes_backward"}
OF_THE_LAYOUT |= {"residual/cache_bytes", "residual/kept_bytes"}


def lively(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    """Weights with which no two streams, sources or gates look alike."""
    weight = default_initialise(name, shape, generator)
    return 12 * weight if "_residual." in name or "residual_head" in name else weight


def toy_of(layout: dict[str, Any]) -> ToyGPT:
    return ToyGPT(**{"dtype": torch.float64, "num_microbatches": 4, **layout})


def build(toy: ToyGPT, text: str) -> list[Any]:
    """The toy on this rank, its records kept away from the disk."""
    monitor.Publisher.publish = lambda self, record: None  # type: ignore[method-assign]
    setup_parallel(toy)
    return build_chunks(toy, spec_for(text), initialise=lively)


def record_step(toy: ToyGPT, text: str) -> Record | None:
    chunks = build(toy, text)
    losses = train_step(chunks, toy)
    return monitor.log_step(1, {"lm loss": torch.tensor(losses).mean()} if losses else None)


def record_of(text: str, **layout: Any) -> Record:
    toy = toy_of(layout)
    *others, last = run_ranks(toy.world_size, record_step, toy, text)
    assert others == [None] * len(others)
    assert last is not None
    return last


@functools.cache
def one_process(name: str) -> Record:
    return record_of(SPECS[name])


def watch_step(toy: ToyGPT, text: str) -> tuple[Record, dict[str, Any]]:
    """A record of one step, and its figures worked out from everything that passed."""
    (chunk,) = build(toy, text)
    all_ = Everything(chunk)
    train_step([chunk], toy)
    record = monitor.log_step(1)
    assert record is not None
    mechanism = chunk.decoder.residual.mechanism
    prefix = "attnres" if "attnres" in mechanism else mechanism
    last = len(all_.modules) - 1
    expected: dict[str, Any] = {
        "residual/hidden_rms": [rms(all_.reads[i]) for i in range(last + 1)],
        "residual/output_rms": [rms([y.detach() for y in all_.outputs[i]]) for i in range(last)],
        "residual/gradient_rms": [rms([y.grad for y in all_.outputs[i]]) for i in range(last)],
    }
    by_place = []
    if isinstance(chunk.decoder.residual.entry, Streams):
        by_place = [stream_figures(all_, i, mhc=mechanism == "mhc") for i in range(last)]
        expected |= {f"{prefix}/{k}": v for k, v in composites(all_, 32).items()}
    if isinstance(chunk.decoder.residual.entry, Sources):
        most = len(all_.pending[last][0].readable)
        by_place = [source_figures(all_, i, most) for i in range(last + 1)]
    for name in by_place[0] if by_place else ():
        expected[f"{prefix}/{name}"] = [figures[name] for figures in by_place]
    added = sum(p.numel() for module in all_.modules for p in module.parameters())
    expected["residual/parameters_added"] = [float(added)]
    return record, expected


def assert_same(found: Record, expected: dict[str, Any], names: set[str]) -> None:
    values = {**found.series, **found.matrices}
    for name in sorted(names):
        torch.testing.assert_close(
            torch.tensor(values[name], dtype=torch.float64),
            torch.tensor(expected[name], dtype=torch.float64),
            rtol=1e-7,
            atol=1e-10,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("name", SPECS)
def test_a_record_equals_figures_from_everything_that_passed(name: str) -> None:
    ((record, expected),) = run_ranks(1, watch_step, toy_of({}), SPECS[name])
    found = {**record.series, **record.matrices}
    assert set(expected) == set(found) - OF_THE_LAYOUT
    assert set(found) <= set(metrics_of(name.replace("dsv4", "mhc")))
    assert_same(record, expected, set(expected))


LAYOUTS = [
    ("mhc", {"pp": 2, "vpp": 2}),
    ("block_attnres", {"pp": 2, "vpp": 2}),
    ("hc", {"tp": 2, "sequence_parallel": True}),
    ("attnres", {"tp": 2}),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_record_is_the_same_on_every_layout(name: str, layout: dict[str, Any]) -> None:
    one, several = one_process(name), record_of(SPECS[name], **layout)
    names = {*one.series, *one.matrices} - OF_THE_LAYOUT
    if layout.get("sequence_parallel"):
        names -= {"hc/composite_forward", "hc/composite_backward", "hc/mixing"}  # of other tokens
    assert_same(several, {**one.series, **one.matrices}, names)
    assert several.losses[1]["lm loss"] == pytest.approx(one.losses[1]["lm loss"], rel=1e-6)


def record_half(toy: ToyGPT, text: str) -> Record | None:
    """Two of four micro-batches on each of two data-parallel ranks."""
    rank, batches = torch.distributed.get_rank(), toy_gpt.micro_batches

    def own(half: ToyGPT) -> Any:
        return itertools.islice(batches(toy_of({})), 2 * rank, None)

    toy_gpt.micro_batches = own
    return record_step(toy, text)


@pytest.mark.parametrize("name", ["mhc", "block_attnres"])
def test_data_parallel_ranks_count_together(name: str) -> None:
    one = one_process(name)
    nothing, record = run_ranks(2, record_half, toy_of({"num_microbatches": 2}), SPECS[name])
    assert nothing is None and record is not None
    gradients = "residual/gradient_rms"
    expected = {**one.series, **one.matrices}
    # the host divides the loss by the micro-batches of a rank, of which there are half as many
    expected[gradients] = [2 * value for value in expected[gradients]]
    assert_same(record, expected, set(expected) - OF_THE_LAYOUT)


def test_gradients_are_those_of_the_loss_without_its_scale() -> None:
    scaled = record_of(SPECS["mhc"], config_overrides={"grad_scale_func": lambda loss: 1024 * loss})
    assert_same(scaled, dict(one_process("mhc").series), {"residual/gradient_rms"})


RECOMPUTE = [
    ("mhc", "recompute='mix'", {}),
    ("mhc", "recompute='group:3'", {}),
    ("mhc", "", {"recompute_granularity": "full", "recompute_method": "uniform"}),
    ("attnres", "recompute='mix'", {}),
    ("block_attnres", "recompute='block+layer'", {}),
    ("block_attnres", "recompute='block'", {}),
]


def count_step(toy: ToyGPT, text: str) -> tuple[Record, set[float], set[int]]:
    """A record, and how many tokens its forward figures and its gradients are sums over."""
    (chunk,) = build(toy, text)
    train_step([chunk], toy)
    assert monitor._current is not None
    current = monitor._current()
    assert current is not None
    tokens = set(current._fields.view(current.sums.flat, "tokens").tolist())
    by_sublayer = current._stages[0].recorder._gradients.values()
    gradients = {count for _, count in by_sublayer}
    record = monitor.log_step(1)
    assert record is not None
    return record, tokens, gradients


@pytest.mark.parametrize(("name", "policy", "host"), RECOMPUTE)
def test_nothing_is_recorded_twice_where_forwards_are_replayed(
    name: str, policy: str, host: dict[str, Any]
) -> None:
    one = one_process(name)
    text = SPECS[name].replace(
        "log_interval", f"{policy}, log_interval" if policy else "log_interval"
    )
    overrides = {**host, "recompute_num_layers": 1} if host else {}
    toy = toy_of({"config_overrides": overrides})
    ((replayed, tokens, gradients),) = run_ranks(1, count_step, toy, text)
    assert tokens == gradients == {4 * 32}
    names = {*one.series, *one.matrices} - OF_THE_LAYOUT
    assert_same(replayed, {**one.series, **one.matrices}, names)
    assert replayed.series["residual/kept_bytes"] < one.series["residual/kept_bytes"]


def test_bytes_are_those_of_the_plan_and_the_cache_holds_what_a_rank_reads_again() -> None:
    text = SPECS["block_attnres"]
    record = record_of(text, pp=2, vpp=2)
    route_plan: TransferPlan = run_ranks(2, plan_of, toy_of({"pp": 2, "vpp": 2}), text)[0]
    row_bytes = 16 * 2 * 32 * 8
    sent = [boundary.rows * row_bytes * 4 for boundary in route_plan.boundaries]
    assert record.series["residual/bytes_forward"] == sent
    assert record.series["residual/bytes_backward"] == sent
    held = record.series["residual/cache_bytes"]
    assert len(held) == 2 and 0 < max(held) <= 4 * route_plan.cache_rows * row_bytes
    assert len(record.series["residual/kept_bytes"]) == 4
    assert min(record.series["residual/kept_bytes"]) > row_bytes


def plan_of(toy: ToyGPT, text: str) -> TransferPlan:
    return build(toy, text)[0].decoder.stage_io.route.plan


def hooks_of(chunk: Any) -> int:
    """Hooks that we have on a chunk now, and whether its steps are watched."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in chunk.modules())
    return hooks + (chunk.decoder.runner.watch is not None)


def hooks_over_steps(toy: ToyGPT, text: str) -> tuple[list[int], list[int], list[int]]:
    """Hooks in each of seven steps, the iterations that were recorded, tokens counted in each."""
    (chunk,) = build(toy, text)
    hooks, iterations, tokens = [], [], []
    for iteration in range(5, 12):
        hooks.append(hooks_of(chunk))
        train_step([chunk], toy)
        train_step([chunk], toy, forward_only=True)  # an evaluation in between counts for nothing
        current = monitor._current() if monitor._current is not None else None
        if current is not None and current._armed:
            tokens.append(int(current._fields.view(current.sums.flat, "tokens")[0]))
        record = monitor.log_step(iteration, {"lm loss": torch.tensor(float(iteration))})
        if record is not None:
            # losses of all steps since the last record come along
            since = iterations[-1] + 1 if iterations else 5
            assert list(record.losses) == list(range(since, iteration + 1))
            assert record.losses[iteration]["lm loss"] == iteration
            iterations.append(record.iteration)
    return hooks, iterations, tokens


def test_hooks_are_on_the_model_in_recorded_steps_only() -> None:
    hooks, recorded, tokens = run_ranks(
        1, hooks_over_steps, toy_of({}), "mhc(streams=2, log_interval=3)"
    )[0]
    # the first step of a process, whatever its number, and every third
    assert recorded == [5, 6, 9]
    on = [iteration for iteration, count in zip(range(5, 12), hooks, strict=True) if count]
    assert on == recorded
    assert tokens == [4 * 32] * 3


def test_a_model_that_does_not_log_is_never_touched() -> None:
    hooks, recorded, tokens = run_ranks(1, hooks_over_steps, toy_of({}), "mhc(streams=2)")[0]
    assert (set(hooks), recorded, tokens) == ({0}, [], [])


def losses_and_grads(toy: ToyGPT, text: str) -> tuple[list[float], list[Tensor]]:
    chunks = build(toy, text)
    losses = train_step(chunks, toy)
    return losses, [p.grad for chunk in chunks for p in chunk.parameters()]


@pytest.mark.parametrize("name", ["mhc", "block_attnres"])
def test_recording_changes_no_loss_and_no_gradient(name: str) -> None:
    toy = toy_of({})
    (on,) = run_ranks(1, losses_and_grads, toy, SPECS[name])
    (off,) = run_ranks(1, losses_and_grads, toy, SPECS[name].replace("log_interval=1", ""))
    assert on[0] == off[0]
    assert all(torch.equal(a, b) for a, b in zip(on[1], off[1], strict=True))


def never_ended(toy: ToyGPT, with_optimizer: bool) -> tuple[list[int], list[int], list[str]]:
    """Living tensors after each step, hooks in it, and warnings, where nobody calls log_step."""
    warned: list[str] = []
    monitor.logger.warning = lambda text, *args: warned.append(text % args)  # type: ignore[method-assign]
    chunks = build(toy, "mhc(streams=2, log_interval=3)")
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    # two optimizers between the same micro-batches are one step
    optimizers = [torch.optim.SGD(part, lr=1e-3) for part in (parameters[:1], parameters[1:])]
    living, hooks = [], []
    for _ in range(6):
        train_step(chunks, toy)
        hooks.append(sum(map(hooks_of, chunks)))
        for optimizer in optimizers if with_optimizer else ():
            optimizer.step()
        gc.collect()
        living.append(sum(isinstance(item, Tensor) for item in gc.get_objects()))
    assert monitor.log_step(12) is None or not with_optimizer
    train_step(chunks, toy)
    monitor.log_step(13)
    monitor.log_step(14)  # the next one is recorded again
    return living, [*hooks, sum(map(hooks_of, chunks))], warned


# Sixteen tensors more were once alive after every step, hooks on all of them, and not a word said.
@pytest.mark.parametrize("with_optimizer", [True, False], ids=["optimizer", "no optimizer"])
def test_recording_that_nobody_ends_is_bounded_and_named_once(with_optimizer: bool) -> None:
    first, last = run_ranks(2, never_ended, toy_of({"pp": 2, "vpp": 2}), with_optimizer)
    for living, hooks, _ in (first, last):
        assert len(set(living[3:])) == 1
        assert [count > 0 for count in hooks[:2]] == [True, True] and hooks[-1] > 0
        assert [count > 0 for count in hooks[2:6]] == [not with_optimizer] * 4
    assert first[2] == [] and len(last[2]) == with_optimizer
    assert all("call megatron_residuals.mcore.monitor.log_step(" in text for text in last[2])
