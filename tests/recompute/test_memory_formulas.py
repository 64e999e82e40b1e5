# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the planner predicts is what autograd keeps, for every policy and schedule."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from megatron_residuals.config import RECOMPUTE, ResidualConfig
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.planner.memory import MemoryPlan, Prediction
from megatron_residuals.recompute.accounting import RetainedBytes, reachable_bytes
from megatron_residuals.testing import run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.retained import layout_text, measure_step, model_sizes
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    build_chunks,
    micro_batches,
    setup_parallel,
    train_step,
)

ALLOWED = 0.02
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SWIGLU = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
TOY = ToyGPT(num_layers=8, hidden_size=64, seq_length=32, vocab_size=96, num_microbatches=4)

MECHANISMS = {
    "hc": ResidualConfig("hc", streams=3),
    "static hc": ResidualConfig("hc", hc_dynamic=False),
    "mhc": ResidualConfig("mhc"),
    "mhc dsv4": ResidualConfig("mhc", streams=2, mhc_convention="dsv4"),
    "attnres": ResidualConfig("attnres"),
    "blocks": ResidualConfig("block_attnres", block_layers=2),
    "cut blocks": ResidualConfig("block_attnres", block_sublayers=3),
    "full transport": ResidualConfig("block_attnres", block_sublayers=5, transport="full"),
}
# Of one kind with one above, under one policy each.
OTHERS = {
    "ihc": ResidualConfig("ihc"),
    "single pass": ResidualConfig("single_pass_mhc", mhc_mixing="permutations"),
    "heads": ResidualConfig("block_attnres", block_layers=2, attnres_heads=4),
}
POLICIES = (*RECOMPUTE, "group:3")
PIPELINES: dict[str, dict[str, Any]] = {
    "one": dict(num_microbatches=1),
    "pp2": dict(pp=2),
    "pp2 vpp2": dict(pp=2, vpp=2),
    "uneven": dict(pp=2, vpp=2, layout=(1, 3, 0, 4)),
}
# Pipelines take longer; each with what it may do to a policy.
PIPELINED = {
    "one": ["ihc/none", "heads/none"],
    "pp2": ["single pass/mix", "mhc/group", "cut blocks/block"],
    "pp2 vpp2": [
        *("mhc/none", "mhc/mix", "mhc/group", "attnres/none", "attnres/block", "blocks/mix"),
        *("cut blocks/none", "cut blocks/mix", "cut blocks/block", "cut blocks/block+layer"),
    ],
    "uneven": ["hc/group:3", "blocks/block", "cut blocks/block+layer", "full transport/block"],
}


def cases() -> list[tuple[str, str, str]]:
    """(pipeline, mechanism, policy)."""
    one = [
        ("one", name, policy)
        for name, residual in MECHANISMS.items()
        for policy in POLICIES
        if residual.mechanism in RECOMPUTE[policy.partition(":")[0]]
    ]
    pairs = ((pipeline, pair) for pipeline, pairs in PIPELINED.items() for pair in pairs)
    return [*one, *((pipeline, *pair.split("/")) for pipeline, pair in pairs)]


class Case(NamedTuple):
    """A toy and the way its stages are cut, for the host and for the planner."""

    toy: ToyGPT
    layout: StageLayout

    def plan(self, residual: ResidualConfig) -> MemoryPlan:
        sizes = model_sizes(self.toy)
        return MemoryPlan(self.layout, residual, sizes, self.toy.num_microbatches)


def case(pipeline: str, **changes: Any) -> Case:
    shape = dict(PIPELINES[pipeline])
    layers = shape.pop("layout", None)
    toy = dataclasses.replace(TOY, **shape, **changes)
    if layers is None:
        return Case(toy, StageLayout.even(toy.num_layers, toy.pp, toy.vpp or 1))
    layout = StageLayout(toy.pp, toy.vpp, layers)
    overrides = {**toy.config_overrides, "pipeline_model_parallel_layout": layout_text(layout)}
    return Case(dataclasses.replace(toy, config_overrides=overrides), layout)


def assert_predicted(case: Case, predicted: Prediction, spec: Any = None) -> None:
    measured = measure_step(case.toy, spec)
    ranks = [memory for memory in predicted.ranks for _ in range(case.toy.tp)]
    for memory, (kept, peak, left) in zip(ranks, measured, strict=True):
        total = sum(memory.kept_parts.values())
        assert abs(total / kept - 1) < ALLOWED, f"rank {memory.rank}: {total} against {kept}"
        assert abs(memory.peak_bytes / peak - 1) < ALLOWED, f"{memory} against {peak}"
        assert left == 0


@pytest.mark.parametrize(("pipeline", "mechanism", "policy"), cases())
def test_kept_and_peak_bytes_are_those_predicted(
    pipeline: str, mechanism: str, policy: str
) -> None:
    this = case(pipeline)
    residual = dataclasses.replace((MECHANISMS | OTHERS)[mechanism], recompute=policy)
    assert_predicted(this, this.plan(residual).predict(), spec_for(residual))


@pytest.mark.parametrize("pipeline", ["one", "uneven"])
@pytest.mark.parametrize("plain", [False, True], ids=["stock", "ours"])
def test_the_plain_residual_keeps_what_the_stock_model_keeps(pipeline: str, plain: bool) -> None:
    this = case(pipeline)
    spec = spec_for("residual()") if plain else None
    assert_predicted(this, this.plan(ResidualConfig()).stock, spec)


@pytest.mark.parametrize("pipeline", ["one", "pp2 vpp2"])
def test_stock_full_recompute_is_predicted(pipeline: str) -> None:
    this = case(pipeline, config_overrides=FULL)
    assert_predicted(this, this.plan(ResidualConfig()).stock_full)


@pytest.mark.parametrize("mechanism", ["mhc", "cut blocks"])
@pytest.mark.parametrize("pipeline", ["one", "pp2 vpp2"])
def test_the_hosts_full_recompute_is_predicted_for_mechanisms_too(
    pipeline: str, mechanism: str
) -> None:
    layers = 2
    this = case(pipeline, config_overrides={**FULL, "recompute_num_layers": layers})
    residual = MECHANISMS[mechanism]
    assert_predicted(this, this.plan(residual).host_full(layers), spec_for(residual))


VARIANTS: dict[str, dict[str, Any]] = {
    "no bias, swiglu, rmsnorm": dict(bias=False, normalization="RMSNorm", config_overrides=SWIGLU),
    "grouped queries": dict(config_overrides=dict(num_query_groups=2)),
    "grouped, learned positions": dict(
        positions="learned_absolute", config_overrides=dict(num_query_groups=2)
    ),
    "learned positions": dict(positions="learned_absolute"),
    "heads of a size of their own": dict(config_overrides=dict(kv_channels=32)),
    "wide ffn, long sequence": dict(seq_length=96, config_overrides=dict(ffn_hidden_size=352)),
    "bf16": dict(dtype=torch.bfloat16, config_overrides=dict(bf16=True)),
    "float64": dict(dtype=torch.float64),
    "tp": dict(tp=2),
    "tp, sequence parallel": dict(tp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", [None, "mhc/mix", "blocks/block"])
def test_the_table_of_the_hosts_layers_holds_for_its_variants(
    variant: str, policy: str | None
) -> None:
    this = case("one", **VARIANTS[variant])
    if policy is None:
        assert_predicted(this, this.plan(ResidualConfig()).stock)
        return
    mechanism, _, recompute = policy.partition("/")
    residual = dataclasses.replace(MECHANISMS[mechanism], recompute=recompute)
    assert_predicted(this, this.plan(residual).predict(), spec_for(residual))


@pytest.mark.parametrize(
    "residual",
    [
        "mhc(recompute='mix')",
        "mhc(recompute='group')",
        "block_attnres(block_layers=2, recompute='mix')",
        "block_attnres(block_layers=2, recompute='block')",
        "block_attnres(block_layers=2, recompute='block+layer')",
    ],
)
def test_no_policy_keeps_activations_where_autograd_does_not_show_them(residual: str) -> None:
    def kept() -> tuple[dict[Any, int], dict[Any, int]]:
        setup_parallel(TOY)
        (chunk,) = build_chunks(TOY, spec_for(residual))
        train_step([chunk], TOY)  # what lives as long as the model: buffers, gradients
        chunk.zero_grad(set_to_none=True)
        batch = next(micro_batches(TOY))
        parameters = list(chunk.parameters())
        before = floats(reachable_bytes(parameters).by_shape)
        with RetainedBytes(exclude=parameters) as retained:
            loss = chunk(batch["tokens"], batch["positions"], batch["mask"]).square().sum()
            shown = floats(retained.measure().by_shape)
            alive = floats(reachable_bytes([*parameters, loss]).by_shape)
            loss.backward()
        return shown, {shape: size - before.get(shape, 0) for shape, size in alive.items()}

    ((shown, alive),) = run_ranks(1, kept)
    grown = {shape: size for shape, size in alive.items() if size > 0}
    assert sum(shown.values()) > 0
    assert sum(grown.values()) <= sum(shown.values()), {
        shape: (size, shown.get(shape, 0)) for shape, size in grown.items()
    }


def floats(by_shape: dict[Any, int]) -> dict[Any, int]:
    """Without random states and indices."""
    return {key: size for key, size in by_shape.items() if key[1].is_floating_point}


# The targets: 32 layers, 8 blocks, no pipeline. Wide enough that numbers per token do not matter.
DEEP = ToyGPT(
    num_layers=32, hidden_size=256, seq_length=16, num_microbatches=1, positions="learned_absolute"
)


class Layers(NamedTuple):
    """Bytes that the layers keep, and those inside their attention and MLP, where asked for."""

    kept_bytes: int
    host_bytes: int


def measure_layers(toy: ToyGPT, residual: str | None, *, inside: bool = False) -> Layers:
    def kept() -> Layers:
        setup_parallel(toy)
        (chunk,) = build_chunks(toy, spec_for(residual) if residual else None)
        batch = next(micro_batches(toy))
        chunk.decoder.final_layernorm = None
        host_bytes = 0
        with RetainedBytes(exclude=[*chunk.parameters(), batch["mask"]]) as retained:
            starts: list[int] = []

            def start(module: Any, inputs: tuple[Any, ...]) -> None:
                starts.append(retained.measure().bytes)

            def stop(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
                nonlocal host_bytes
                # the input is the norm's output, which belongs to the residual
                grown = retained.measure().bytes - starts.pop()
                host_bytes += grown - inputs[0].untyped_storage().nbytes()

            for layer in chunk.decoder.layers if inside else ():
                for module in (layer.self_attention, layer.mlp):
                    module.register_forward_pre_hook(start)
                    module.register_forward_hook(stop)
            hidden = torch.randn(
                toy.seq_length, toy.micro_batch_size, toy.hidden_size, requires_grad=True
            )
            output = chunk.decoder(hidden_states=hidden, attention_mask=batch["mask"])
            assert output.requires_grad
            return Layers(retained.measure().bytes, host_bytes)

    (layers,) = run_ranks(1, kept)
    return layers


def test_block_recompute_keeps_less_than_a_third_of_stock_full_recompute() -> None:
    stock = dataclasses.replace(DEEP, config_overrides=FULL)
    full = measure_layers(stock, None).kept_bytes
    row = DEEP.seq_length * DEEP.micro_batch_size * DEEP.hidden_size * 4
    assert full == 32 * row
    for policy in ("block", "block+layer"):
        residual = f"block_attnres(block_layers=4, recompute={policy!r})"
        block = measure_layers(DEEP, residual).kept_bytes
        # the embedding and eight blocks, and what the last read keeps for each
        assert 9 * row <= block <= 9 * row * 1.01
        assert block / full <= 0.31
        plan = Case(DEEP, StageLayout.even(32, 1)).plan(ResidualConfig.parse(residual))
        assert abs(plan.predict().worst.kept_bytes / block - 1) < ALLOWED
        assert plan.stock_full.worst.kept_bytes == full


def test_grouped_streams_keep_about_a_third_outside_attention_and_mlp() -> None:
    kept = {}
    for policy in ("none", "group:auto"):
        residual = f"mhc(recompute={policy!r})"
        total, host = measure_layers(DEEP, residual, inside=True)
        kept[policy] = total - host
        plan = Case(DEEP, StageLayout.even(32, 1)).plan(ResidualConfig.parse(residual))
        predicted = plan.predict().worst.kept_parts
        assert abs(predicted["residual"] / kept[policy] - 1) < ALLOWED
        assert abs(predicted["attention_and_mlp"] / host - 1) < ALLOWED
    assert kept["group:auto"] / kept["none"] <= 0.35


def test_a_step_leaves_nothing_and_the_next_one_has_the_same_peak() -> None:
    toy = dataclasses.replace(TOY, pp=2, vpp=2)

    def peaks() -> list[int]:
        setup_parallel(toy)
        chunks = build_chunks(toy, spec_for("block_attnres(block_layers=2, recompute='block')"))
        parameters = [each for chunk in chunks for each in chunk.parameters()]
        found = []
        for _ in range(3):
            with RetainedBytes(exclude=parameters, sample_backward=True) as retained:
                train_step(chunks, toy)
                assert retained.measure().bytes == 0
            found.append(retained.peak)
        return found

    for first, second, third in run_ranks(2, peaks):
        assert 0 < first == second == third
