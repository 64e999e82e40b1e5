# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What passes cost, what is compared, and where the time of a step goes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.pipeline.layout import GPT_LAYER, StageLayout
from megatron_residuals.pipeline.traffic import (
    SUM_OF_SOURCE,
    Planes,
    one_pass,
    plain,
    two_phases,
)
from megatron_residuals.planner.simulate.costs import (
    PassCosts,
    Rates,
    logit_flops,
    sublayer_flops,
)
from megatron_residuals.planner.simulate.hardware import GPUS, NETWORKS, Gpu
from megatron_residuals.planner.simulate.links import FREE, Link, Network
from megatron_residuals.planner.simulate.schemes import SCHEMES, schemes
from megatron_residuals.planner.simulate.simulator import Cluster, Result, simulate
from megatron_residuals.planner.simulate.trace import chrome_trace
from megatron_residuals.planner.sizes import ModelSizes, flash_layer_bytes

SIZES = ModelSizes(
    seq_length=256, micro_batch_size=2, hidden_size=128, ffn_hidden_size=512, num_heads=4
)
GPU = Gpu(1e12, 1e11, Link(1e10, 0))
RATES = Rates(GPU, efficiency=0.5, memory_efficiency=0.5)
LAYOUT = StageLayout.even(16, 4, 2)
NETWORK = Network(GPU.inside, Link(2e9, 1e-5))


def layer_flops(sizes: ModelSizes) -> int:
    return sum(sublayer_flops(sizes, kind) for kind in GPT_LAYER)


def costs(residual: str, policy: str = "none", layout: StageLayout = LAYOUT) -> PassCosts:
    return PassCosts(layout, ResidualConfig.parse(residual), SIZES, RATES, policy)


def results(network: Network = NETWORK, **options: int) -> dict[str, Result]:
    cluster = Cluster(RATES, network)
    found = schemes(LAYOUT, SIZES, block_layers=2, num_microbatches=8, **options)
    return {scheme.name: simulate(scheme, cluster) for scheme in found}


def test_a_layers_products_are_24_h_squared_per_token_and_half_the_scores() -> None:
    tokens, h, s = 512, 128, 256
    assert layer_flops(SIZES) == 24 * tokens * h * h + 2 * tokens * s * h
    grouped = dataclasses.replace(SIZES, query_groups=1, gated=True, tp=2, vocab_size=1000)
    projections = 2 * h * (2 * h + 2 * 32)
    assert layer_flops(grouped) == tokens * (projections + 2 * s * h + 6 * h * 512) // 2
    assert logit_flops(grouped) == 2 * tokens * h * 1000 // 2
    assert logit_flops(SIZES) == 0


def test_only_what_a_mechanism_moves_beyond_the_plain_residual_takes_time() -> None:
    assert set(costs("residual()").planes) == {Planes(0, 0)}
    # four sublayers, of which the first reads and the last writes by itself
    moved = Planes(9 + 3 * 14 + 9, 18 + 3 * 24 + 14)
    mhc = costs("mhc(streams=4)").planes
    assert mhc[0] == moved.plus(Planes(3, 3), times=-4)
    assert mhc[7] == mhc[0].plus(Planes(5, 9))


def test_the_way_to_read_is_that_of_the_whole_block_on_every_stage_that_has_a_part_of_it() -> None:
    # The simulator took the cheaper way for each part of a block, and not the one that was chosen.
    layout = StageLayout.even(8, 8)  # two sublayers per stage, half a block of four
    for choice, way in (("off", one_pass), ("auto", two_phases), ("on", two_phases)):
        residual = f"block_attnres(block_sublayers=4, two_phase={choice!r})"
        planes = costs(residual, layout=layout).planes
        for g in range(7):
            opens = g % 2 == 0
            expected = way(g // 2 + 1, 2, opens=opens).plus(SUM_OF_SOURCE, g // 2 + 1)
            assert planes[g] == expected.plus(plain(2), times=-1)


def test_later_stages_read_more_sources_and_take_longer() -> None:
    plain, deep = costs("residual()"), costs("block_attnres(block_layers=1)")
    assert len(set(plain.forward_s)) == 1
    assert plain.backward_s[0] == 2 * plain.forward_s[0]
    assert plain.forward_s[0] == 2 * layer_flops(SIZES) / (0.5 * 1e12)
    for of_plain, by_stage in (
        (plain.forward_s, deep.forward_s),
        (plain.backward_s, deep.backward_s),
    ):
        assert list(by_stage) == sorted(set(by_stage))
        assert by_stage[0] > of_plain[0]
    one_more_plane = SIZES.row_bytes / (0.5 * 1e11)
    first, second = (deep.planes[g].forward for g in (0, 1))
    difference = deep.forward_s[1] - deep.forward_s[0]
    assert difference == pytest.approx((second - first) * one_more_plane, rel=1e-9)


def test_recomputation_costs_what_it_replays() -> None:
    none, block = (
        costs("block_attnres(block_layers=2)"),
        costs("block_attnres(block_layers=2)", "block"),
    )
    assert block.forward_s == none.forward_s
    extra = [b - a for a, b in zip(none.backward_s, block.backward_s, strict=True)]
    assert extra == pytest.approx(none.forward_s, rel=1e-9)
    twice = costs("block_attnres(block_layers=2)", "block+layer").backward_s
    assert [b - a for a, b in zip(none.backward_s, twice, strict=True)] == pytest.approx(
        [2 * s for s in none.forward_s], rel=1e-9
    )
    streams, grouped = costs("mhc()"), costs("mhc()", "group:3")
    products = 2 * layer_flops(SIZES) / 0.5e12
    assert grouped.backward_s[0] - streams.backward_s[0] == pytest.approx(
        streams.forward_s[0] - products, rel=1e-9
    )
    full = costs("residual()", "stock full/uniform/1")
    assert full.backward_s[0] == pytest.approx(3 * products, rel=1e-9)


def test_the_parts_of_a_step_add_up_and_each_scheme_has_its_price() -> None:
    found = results()
    assert list(found) == list(SCHEMES)
    for name, each in found.items():
        parts = (each.mean_busy_s, each.imbalance_s, each.bubble_s, each.exposed_s)
        assert sum(parts) == pytest.approx(each.step_s, rel=1e-12), name
        assert min(parts) >= -1e-12 and each.exposed_s > 0
        assert each.prediction.policy == ("stock" if name == "plain" else "none")
    plain = found["plain"]
    assert plain.imbalance_s == pytest.approx(0, abs=1e-12)
    assert plain.bubble_fraction == pytest.approx(3 / 16, rel=1e-9)
    products = 3 * 16 * layer_flops(SIZES) * 8
    assert plain.share_of_peak == pytest.approx(products / (4 * 1e12 * plain.step_s), rel=1e-12)
    assert plain.tokens_per_s == pytest.approx(8 * 512 / plain.step_s, rel=1e-12)


def test_delta_sends_less_than_full_and_full_less_than_padded() -> None:
    found = results()
    delta, full, padded = (found[f"attnres {name}"] for name in ("delta", "full", "padded"))
    for scheme in (delta, full):
        assert sum(scheme.bytes_sent) == 2 * 8 * scheme.scheme.plan.rows * SIZES.row_bytes
    assert full.scheme.plan.rows_delta == delta.scheme.plan.rows
    assert sum(padded.bytes_sent) == 2 * 8 * 7 * (1 + 8) * SIZES.row_bytes
    assert delta.exposed_s < full.exposed_s < padded.exposed_s
    assert delta.busy_s == pytest.approx(full.busy_s) and full.busy_s == pytest.approx(
        padded.busy_s
    )
    worst = [each.prediction.worst.peak_bytes for each in (delta, full, padded)]
    assert worst[0] <= worst[1] < worst[2]


def test_free_links_expose_nothing() -> None:
    assert all(each.exposed_s == 0 for each in results(Network(FREE, FREE)).values())


def test_a_budget_buys_recomputation() -> None:
    cluster = Cluster(RATES, NETWORK)
    for scheme in schemes(LAYOUT, SIZES, block_layers=2, num_microbatches=8):
        free = simulate(scheme, cluster)
        peak = free.prediction.worst.peak_bytes
        tight = simulate(scheme, cluster, peak - 1)
        assert tight.prediction.worst.peak_bytes < peak
        assert tight.prediction.policy != free.prediction.policy
        assert tight.step_s > free.step_s
        assert simulate(scheme, cluster, peak).prediction.policy == free.prediction.policy
        least = min(each.worst.peak_bytes for each in scheme.policies())
        assert simulate(scheme, cluster, 1).prediction.worst.peak_bytes == least


def test_flash_attention_keeps_nothing_that_grows_with_the_square_of_the_length() -> None:
    short, long = (dataclasses.replace(SIZES, seq_length=s) for s in (256, 1024))
    assert flash_layer_bytes(long) == 4 * flash_layer_bytes(short)
    # the projection (v is a view of it), q and k rotated, context; one float32 per head; two of the
    # MLP. Queries and keys were counted once: a rehearsal found them twice.
    assert flash_layer_bytes(short) == 512 * (6 * 128 * 2 + 4 * 4 + 2 * 512 * 2)
    plain = dataclasses.replace(SIZES, seq_length=256, rope=False)
    assert flash_layer_bytes(plain) == 512 * (4 * 128 * 2 + 4 * 4 + 2 * 512 * 2)
    gated = dataclasses.replace(SIZES, gated=True, query_groups=2, tp=2)
    assert flash_layer_bytes(gated) == 512 * (9 * 32 * 2 + 2 * 4 + 3 * 512)


def test_the_trace_has_every_pass_and_message_on_a_row_of_its_own() -> None:
    result = results()["attnres delta"]
    timeline = result.timeline()
    events = chrome_trace([("a", LAYOUT, timeline), ("b", LAYOUT, timeline)])
    rows: dict[tuple[object, object], float] = {}
    for event in events["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "message":
            key, duration = (event["pid"], event["tid"]), event["dur"]
            assert isinstance(duration, float)
            rows[key] = rows.get(key, 0.0) + duration
    assert rows == pytest.approx(
        {(pid, 3 * rank): 1e6 * result.busy_s[rank] for pid in (0, 1) for rank in range(4)}
    )
    names = [event["name"] for event in events["traceEvents"] if event["pid"] == 1]
    assert {name for name in names if str(name).startswith("F")} == {
        f"F{m}.{g}" for m in range(8) for g in range(8)
    }
    moved = [e for e in events["traceEvents"] if e.get("cat") == "message"]
    assert len(moved) == 2 * len(timeline.messages)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_computes_faster_than_it_reads_and_reads_faster_than_it_sends(
    name: str,
) -> None:
    gpu = GPUS[name]
    assert gpu.flops_per_s > gpu.memory_bytes_per_s > gpu.inside.bytes_per_s
    assert all(gpu.inside.bytes_per_s > link.bytes_per_s for link in NETWORKS.values())
    assert all(math.isfinite(rate) for rate in (gpu.flops_per_s, gpu.memory_bytes_per_s))


@pytest.mark.parametrize("share", [0, 1.5, -0.1])
def test_a_share_of_peak_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Rates(GPU, efficiency=share)
