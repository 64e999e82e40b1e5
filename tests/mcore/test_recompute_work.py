# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What every recompute policy runs, how often, what it keeps, leaves behind, and refuses."""

from __future__ import annotations

import functools
import gc
import math
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.tensor_parallel import random as host_random

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.support import check_model
from megatron_residuals.modules import SourceState
from megatron_residuals.recompute.accounting import RetainedBytes, reachable_bytes
from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    micro_batches,
    setup_parallel,
    train_step,
    transformer_config,
)
from megatron_residuals.testing.toy_weights import full_grads

LAYERS = 4
SUBLAYERS = 2 * LAYERS
SMALL = dict(
    num_layers=LAYERS,
    hidden_size=16,
    num_heads=2,
    seq_length=6,
    num_microbatches=3,
    dtype=torch.float64,
    dropout=0.1,
)
MHC = "mhc(streams=2, mhc_sinkhorn_iterations=3, recompute={!r})"
BLOCKS = "block_attnres(block_sublayers=3, recompute={!r})"


class Policy(NamedTuple):
    """A residual with a policy of ours or of the host's, and what runs how often.

    Attributes:
        runs: forwards of each layer's attention and MLP in one micro-batch, backward included.
        reads, writes: of the residual at each sublayer, likewise; rereads in all.
    """

    residual: str
    ours: str
    host: dict[str, Any]
    runs: list[int]
    rereads: int = 0
    extra_writes: int = 0


def full(method: str, layers: int) -> dict[str, Any]:
    return dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)


def group(length: int) -> Policy:
    again = SUBLAYERS - math.ceil(SUBLAYERS / length)
    return Policy(MHC, f"group:{length}", {}, [1] * LAYERS, SUBLAYERS, again)


POLICIES = {
    "mhc-none": Policy(MHC, "none", {}, [1] * LAYERS),
    "mhc-mix": Policy(MHC, "mix", {}, [1] * LAYERS, rereads=SUBLAYERS),
    "mhc-group-3": group(3),
    "mhc-group-8": group(8),
    "blocks-none": Policy(BLOCKS, "none", {}, [1] * LAYERS),
    "blocks-mix": Policy(BLOCKS, "mix", {}, [1] * LAYERS, rereads=SUBLAYERS),
    "blocks-block": Policy(BLOCKS, "block", {}, [2] * LAYERS),
    "blocks-block+layer": Policy(BLOCKS, "block+layer", {}, [3, 3, 3, 2]),  # the last: one layer
    "mhc-full-uniform": Policy(MHC, "none", full("uniform", 1), [2] * LAYERS),
    "blocks-full-uniform": Policy(BLOCKS, "none", full("uniform", 3), [2] * LAYERS),
    "blocks-full-block": Policy(BLOCKS, "none", full("block", 1), [2, 1, 1, 1]),
}
# of each kind of policy, ours and the host's, one runs on every release
EVERYWHERE = "mhc-mix mhc-group-3 blocks-block+layer mhc-full-uniform blocks-full-block".split()
POLICY_CASES = [
    pytest.param(name, marks=() if name in EVERYWHERE else pytest.mark.newest) for name in POLICIES
]
every_policy = pytest.mark.parametrize("name", POLICY_CASES)


def build(policy: Policy) -> tuple[ToyGPT, Any]:
    toy = ToyGPT(**SMALL, config_overrides=policy.host)
    setup_parallel(toy)
    (chunk,) = build_chunks(toy, spec_for(policy.residual.format(policy.ours)))
    return toy, chunk


def forward(chunk: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = chunk(batch["tokens"], batch["positions"], batch["mask"])
    return logits.square().mean()


def count_calls(owner: Any, name: str, note: Callable[..., None]) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def counted(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return stock(*args, **kwargs)

    setattr(owner, name, counted)


def count_rereads(module: Any, note: Callable[..., None]) -> None:
    stock = module.rereader

    def rereader(pending: Any) -> Callable[[], Any]:
        again = stock(pending)
        count_calls(holder := types.SimpleNamespace(again=again), "again", note)
        return holder.again

    module.rereader = rereader


def residuals(chunk: Any) -> list[torch.nn.Module]:
    """Of every sublayer, in order."""
    return [
        module
        for layer in chunk.decoder.layers
        for module in (layer.self_attention_residual, layer.mlp_residual)
    ]


def count_one_micro_batch(policy: Policy) -> tuple[Counter[Any], list[tuple[int, int]]]:
    """Calls by (name, index), and (sublayer, sources seen) of every read of depth sources."""
    toy, chunk = build(policy)
    calls: Counter[Any] = Counter()
    seen: list[tuple[int, int]] = []

    def note(*key: Any) -> Callable[..., None]:
        return lambda *_: calls.update([key])

    def note_sources(i: int) -> Callable[..., None]:
        def see(state: Any) -> None:
            if isinstance(state, SourceState):
                seen.append((i, len(state.readable) - 1))

        return see

    for i, layer in enumerate(chunk.decoder.layers):
        count_calls(layer, "_forward_attention", note("attention", i))
        count_calls(layer, "_forward_mlp", note("mlp", i))
    for i, module in enumerate(residuals(chunk)):
        count_calls(module, "read", note("read", i))
        count_calls(module, "read", note_sources(i))
        count_rereads(module, note("reread"))
        count_calls(module, "write", note("write"))
    count_calls(chunk.decoder.residual_head, "close", note("close"))
    forward(chunk, next(micro_batches(toy))).backward()
    return calls, seen


@pytest.mark.host
@every_policy
def test_everything_runs_exactly_as_often_as_the_policy_says(name: str) -> None:
    policy = POLICIES[name]
    ((calls, _),) = run_ranks(1, count_one_micro_batch, policy)
    assert [calls["attention", i] for i in range(LAYERS)] == policy.runs
    assert [calls["mlp", i] for i in range(LAYERS)] == policy.runs
    assert [calls["read", i] for i in range(SUBLAYERS)] == reads_of(policy)
    runs = 2 * sum(policy.runs)  # of sublayers
    assert calls[("write",)] == runs + policy.extra_writes
    assert calls[("reread",)] == policy.rereads
    assert calls[("close",)] == 1


def reads_of(policy: Policy) -> list[int]:
    """At each sublayer; AttnRes rereads by reading again, mHC with the coefficients it has."""
    again = policy.rereads // SUBLAYERS if policy.residual == BLOCKS else 0
    return [policy.runs[i // 2] + again for i in range(SUBLAYERS)]


BLOCK_POLICIES = {name: policy for name, policy in POLICIES.items() if name.startswith("blocks")}


@pytest.mark.parametrize("policy", BLOCK_POLICIES.values(), ids=BLOCK_POLICIES)
def test_every_replay_sees_the_sources_that_the_depth_map_says(policy: Policy) -> None:
    ((_, seen),) = run_ranks(1, count_one_micro_batch, policy)
    depth = ResidualConfig.parse(BLOCKS.format("none")).depth_map(LAYERS)
    assert depth is not None
    assert sorted(seen) == sorted(
        (i, depth.num_sources(i)) for i, reads in enumerate(reads_of(policy)) for _ in range(reads)
    )


def watch_outer_states(policy: Policy) -> list[tuple[int, bool]]:
    """For two micro-batches in flight: sources behind the stage, and whether backward kept them."""
    toy, chunk = build(policy)
    states: list[SourceState] = []
    stock = chunk.decoder.runner.run

    def run(*args: Any, **kwargs: Any) -> Any:
        states.append(stock(*args, **kwargs))
        return states[-1]

    chunk.decoder.runner.run = run
    batches = list(micro_batches(toy))[:2]
    losses = [forward(chunk, batch) for batch in batches]
    before = [snapshot(state) for state in states]
    for loss in losses:
        loss.backward()
    assert len(states) == 2
    return [
        (len(state.sources), all(map(torch.equal, copies, (*state.sources, state.partial))))
        for state, copies in zip(states, before, strict=True)
    ]


def snapshot(state: SourceState) -> list[torch.Tensor]:
    tensors = (*state.sources, state.partial)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("policy", BLOCK_POLICIES.values(), ids=BLOCK_POLICIES)
def test_replays_leave_the_list_of_sources_as_it_was(policy: Policy) -> None:
    (found,) = run_ranks(1, watch_outer_states, policy)
    depth = ResidualConfig.parse(BLOCKS.format("none")).depth_map(LAYERS)
    assert depth is not None
    assert found == [(depth.num_sources(SUBLAYERS), True)] * 2


def memory_of_steps(policy: Policy) -> list[tuple[int, int, int]]:
    """By step: bytes that autograd keeps before and after backward, and all that is alive then."""
    toy, chunk = build(policy)
    found = []
    for _ in range(3):
        chunk.zero_grad(set_to_none=True)
        with RetainedBytes() as retained:
            loss = forward(chunk, next(micro_batches(toy)))
            kept = retained.measure().bytes
            loss.backward()
            del loss
            left = retained.measure().bytes
        found.append((kept, left, reachable_bytes().bytes))
    return found


@functools.cache
def measured(name: str) -> list[tuple[int, int, int]]:
    return run_ranks(1, memory_of_steps, POLICIES[name])[0]


@pytest.mark.host
@every_policy
def test_memory_after_a_step_is_memory_after_the_next(name: str) -> None:
    steps = measured(name)
    assert len(set(steps)) == 1
    kept, left, _ = steps[0]
    assert kept > 0 and left == 0


def test_recomputation_keeps_less() -> None:
    kept = {name: measured(name)[0][0] for name in POLICIES}
    assert kept["blocks-none"] > kept["blocks-mix"] > kept["blocks-block+layer"]
    assert kept["mhc-none"] > kept["mhc-group-3"]


class AttentionFailed(Exception):
    """Raised in the middle of a forward."""


def step_after_one_that_raised(policy: Policy) -> tuple[list[int], list[ToyResult]]:
    toy, chunk = build(policy)
    train_step([chunk], toy)
    alive, results = [], []
    for raising in (False, True, False):
        host_random.model_parallel_cuda_manual_seed(toy.seed + 1)
        if raising:
            attention = chunk.decoder.layers[3].self_attention
            handle = attention.register_forward_pre_hook(fail_in_second_micro_batch())
            with pytest.raises(AttentionFailed):
                train_step([chunk], toy)
            handle.remove()
        else:
            losses = train_step([chunk], toy)
            results.append(ToyResult(losses, full_grads([chunk])))
        chunk.zero_grad(set_to_none=True)
        exclude = [tensor for result in results for tensor in result.grads.values()]
        alive.append(reachable_bytes(exclude).bytes)
    return alive, results


def fail_in_second_micro_batch() -> Callable[..., None]:
    calls = Counter[str]()

    def fail(*_: Any) -> None:
        calls["attention"] += 1
        if calls["attention"] == 3:  # forward and replay of the first, or simply the third
            raise AttentionFailed

    return fail


@pytest.mark.host
@every_policy
def test_a_step_that_raises_leaves_nothing_and_the_next_is_as_if_it_had_not_been(
    name: str,
) -> None:
    ((alive, results),) = run_ranks(1, step_after_one_that_raised, POLICIES[name])
    first, second = results
    assert first.losses == second.losses
    for key, gradient in first.grads.items():
        assert_close(second.grads[key], gradient, dtype=torch.float64, kind="exact", name=key)
    assert alive[2] == alive[0]
    assert alive[1] == alive[0]


def refusal(residual: ResidualConfig, **overrides: Any) -> str:
    toy = ToyGPT(config_overrides={})
    config = transformer_config(toy)
    for name, value in overrides.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as error:
        check_model(config, [], residual)
    return str(error.value)


@pytest.mark.parametrize(
    "residual", ["mhc(recompute='mix')", "mhc(recompute='group:2')", "attnres(recompute='block')"]
)
def test_full_recomputation_of_the_host_excludes_ours_by_name(residual: str) -> None:
    config = ResidualConfig.parse(residual)
    message = refusal(config, recompute_granularity="full")
    assert "recompute_granularity = 'full'" in message
    assert f"--residual-recompute {config.recompute}" in message


@pytest.mark.parametrize("policy", ["block", "block+layer"])
def test_saved_activations_are_not_distributed_where_sources_are_shared(policy: str) -> None:
    residual = ResidualConfig("block_attnres", recompute=policy)
    message = refusal(residual, distribute_saved_activations=True)
    assert "drop --distribute-saved-activations" in message
    message = refusal(
        ResidualConfig("mhc"), recompute_granularity="full", distribute_saved_activations=True
    )
    assert "drop --distribute-saved-activations" in message


@pytest.mark.host
@pytest.mark.parametrize("policy", ["mix", "group:2"])
def test_a_host_that_cannot_recompute_its_norms_is_refused_naming_what_to_install(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, fp8: Any = False) -> None:
        self.fp8 = fp8 is not None  # the host's own test, which takes False for a wish

    monkeypatch.setattr(host_random, "HAVE_TE", False)
    monkeypatch.setattr(host_random.CheckpointWithoutOutput, "__init__", broken)
    message = refusal(ResidualConfig("mhc", recompute=policy))
    assert f"--residual-recompute {policy}" in message
    assert "Transformer Engine" in message
    check_model(transformer_config(ToyGPT()), [], ResidualConfig("mhc"))


def test_policies_do_not_run_in_evaluation() -> None:
    for name in ("blocks-block", "mhc-mix", "mhc-group-3", "blocks-full-uniform"):
        ((calls, losses),) = run_ranks(1, evaluate, POLICIES[name])
        assert calls == {"attention": LAYERS}
        assert losses[0] == losses[1]


def evaluate(policy: Policy) -> tuple[Counter[str], list[float]]:
    toy, chunk = build(policy)
    chunk.eval()
    calls: Counter[str] = Counter()
    for layer in chunk.decoder.layers:
        count_calls(layer, "_forward_attention", lambda *_: calls.update(["attention"]))
    batch = next(micro_batches(toy))
    with torch.no_grad():
        losses = [forward(chunk, batch).item()]
    counted = Counter(calls)
    gc.collect()
    # with gradients, as when an evaluation wants them: mixes may run again, layers may not
    loss = forward(chunk, batch)
    losses.append(loss.item())
    loss.backward()
    assert calls["attention"] == 2 * LAYERS
    return counted, losses
