# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals simulate`: step time, bubble, exposed messages and memory of a pipeline."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_residuals.commands.arguments import (
    Subparsers,
    add_layout_options,
    add_model_options,
    add_size_options,
    add_step_options,
    model_sizes,
    stage_layout,
    whole_rows_note,
)
from megatron_residuals.commands.launch import (
    add_launch_options,
    forecast_of,
    launch_fields,
    with_remarks,
)
from megatron_residuals.planner.simulate.costs import Rates
from megatron_residuals.planner.simulate.hardware import GPUS, NETWORKS
from megatron_residuals.planner.simulate.links import Link, Network
from megatron_residuals.planner.simulate.schemes import SCHEMES, Scheme, schemes
from megatron_residuals.planner.simulate.simulator import Cluster, Result, simulate
from megatron_residuals.planner.simulate.trace import chrome_trace
from megatron_residuals.text import format_bytes, table

if TYPE_CHECKING:
    from megatron_residuals.mcore.training.forecast import Forecast

GIB = 2**30
MS = 1e3

EXAMPLES = """\
examples:
  megatron-residuals simulate --layers 48 --block-layers 6 --pp 8 --vpp 2 --microbatches 64 \\
      --hidden-size 7168 --seq-length 4096 --micro-batch-size 1 --tp 8 --sequence-parallel \\
      --gpu h100 --network ndr --flash-attention
  megatron-residuals simulate --layers 32 --pp 4 --vpp 4 --microbatches 16 --hidden-size 4096 \\
      --seq-length 8192 --micro-batch-size 1 --gpu gb200 --ranks-per-node 4 --trace trace.json
"""

ASSUMPTIONS = """\
step: forward and backward of all micro-batches; no optimizer, no data-parallel reduction.
compute: mean over the ranks; imbalance: what the busiest has more; bubble: what the schedule adds
if messages cost nothing; exposed: what the links add to that. peak: predicted activations on the
worst rank under the policy named; weights and optimizer come on top."""


def register(commands: Subparsers) -> None:
    """`simulate`: a training step of a pipeline, from sizes alone."""
    parser = commands.add_parser(
        "simulate",
        help="predict step time, bubble, exposed messages and memory of a pipeline",
        description="Play the host's 1F1B or interleaved schedule for the plain residual, mHC, and "
        "AttnRes with full, padded and delta transport, and print what each costs. Needs neither a "
        "GPU nor torch; a launch behind -- is read by Megatron.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--layers", type=int, metavar="L", help="transformer layers of the model")
    add_step_options(parser)
    add("--budget-gib", type=float, metavar="GIB", help="recompute what it takes to fit")
    add("--trace", type=Path, metavar="FILE", help="write the timelines in Chrome's trace format")
    add("--json", action="store_true", help="print JSON instead of the table")
    residual = parser.add_argument_group("residual")
    residual.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    residual.add_argument("--streams", type=int, default=4, metavar="N", help="of mHC (default: 4)")
    for name, metavar, text in (
        ("block-layers", "K", "AttnRes block, in layers (default: about eight blocks)"),
        ("block-sublayers", "S", "AttnRes block, in sublayers; 1 is Full AttnRes"),
    ):
        residual.add_argument(f"--{name}", type=int, metavar=metavar, help=text)
    add_layout_options(parser.add_argument_group("layers per stage (default: all equal)"))
    sizes = parser.add_argument_group("sizes (the first three are needed)")
    add_size_options(sizes)
    add_model_options(sizes)
    _add_schedule_options(parser.add_argument_group("schedule"))
    hardware = parser.add_argument_group("hardware")
    _add_hardware_options(hardware)
    parser.set_defaults(handler=run_simulate)
    rates = [action.dest for action in hardware._group_actions]
    others = ["json", "trace", "budget_gib", "schemes", "host_layer_bytes"]
    add_launch_options(parser, beside=[*rates, *others])


def _add_schedule_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--no-overlap-p2p-communication",
        dest="overlap",
        action="store_const",
        const="off",
        default="steady",
        help="messages of an interleaved schedule do not overlap with passes",
    )
    add(
        "--overlap-p2p-communication-warmup-flush",
        dest="overlap",
        action="store_const",
        const="all",
        help="they do in warm-up and cool-down as well",
    )
    add(
        "--no-wait-for-sends",
        dest="waits_for_sends",
        action="store_false",
        help="as Megatron-Core before 0.18, or without deallocated outputs: go on while an output "
        "is being sent",
    )


def _add_hardware_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--gpu", choices=GPUS, default="h100", help="(default: h100)")
    add("--network", choices=NETWORKS, default="ndr", help="between nodes (default: ndr)")
    add(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="N",
        help="neighbouring pipeline ranks that share a node's fast links (default: 1)",
    )
    add(
        "--efficiency",
        type=float,
        default=Rates.efficiency,
        metavar="SHARE",
        help="of peak FLOP/s that your stock model reaches while it computes (default: "
        f"{Rates.efficiency:g})",
    )
    add(
        "--memory-efficiency",
        type=float,
        default=Rates.memory_efficiency,
        metavar="SHARE",
        help="of peak memory bandwidth that mixing kernels reach (default: "
        f"{Rates.memory_efficiency:g})",
    )
    for name, text in (
        ("tflops", "peak TFLOP/s of a GPU, instead of the table's"),
        ("memory-gb-per-s", "its memory bandwidth, likewise"),
        ("inside-gb-per-s", "links inside a node, each direction, likewise"),
        ("network-gb-per-s", "network of one GPU, each direction, likewise"),
        ("inside-latency-us", "latency inside a node, likewise"),
        ("network-latency-us", "latency between nodes, likewise"),
    ):
        add(f"--{name}", type=float, metavar="X", help=text)


def run_simulate(args: argparse.Namespace) -> int:
    """Play a step of every scheme and print what it costs."""
    forecast, cluster = forecast_of(args), cluster_of(args)
    if forecast is not None:
        cluster = dataclasses.replace(
            cluster, overlap=forecast.overlap, waits_for_sends=forecast.waits_for_sends
        )
    budget = None if args.budget_gib is None else int(args.budget_gib * GIB)
    results = [simulate(scheme, cluster, budget) for scheme in _schemes(args, forecast)]
    if args.trace is not None:
        timelines = ((r.scheme.name, r.layout, r.timeline()) for r in results)
        args.trace.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
    if args.json:
        fields = {
            "cluster": dataclasses.asdict(cluster),
            "schemes": [_fields(result, budget) for result in results],
        }
        print(json.dumps(fields | launch_fields(forecast), indent=2))
    else:
        print(with_remarks(describe(results, cluster, args, budget), forecast))
    return 0


def _schemes(args: argparse.Namespace, forecast: Forecast | None) -> list[Scheme]:
    if forecast is None:
        found = schemes(
            stage_layout(args),
            model_sizes(args, "simulate"),
            streams=args.streams,
            block_layers=args.block_layers,
            block_sublayers=args.block_sublayers,
            num_microbatches=args.pp if args.microbatches is None else args.microbatches,
            group_size=args.microbatch_group_size,
        )
    else:
        plan = forecast.plan
        depth = plan.residual.depth_map(plan.layout.num_layers, plan.layout.sublayers_per_layer)
        found = schemes(
            plan.layout,
            plan.sizes,
            streams=getattr(plan.residual.options, "streams", args.streams),
            block_sublayers=None if depth is None else depth.block_sublayers,
            num_microbatches=plan.num_microbatches,
            group_size=plan.group_size,
        )
    return [scheme for scheme in found if scheme.name in args.schemes]


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The hardware and the schedule that the options describe.

    Raises:
        ValueError: a rate that is not above zero.
    """

    def given(value: float | None, unit: float, default: float) -> float:
        return default if value is None else value * unit

    gpu, network = GPUS[args.gpu], NETWORKS[args.network]
    inside = Link(
        given(args.inside_gb_per_s, 1e9, gpu.inside.bytes_per_s),
        given(args.inside_latency_us, 1e-6, gpu.inside.latency_s),
    )
    between = Link(
        given(args.network_gb_per_s, 1e9, network.bytes_per_s),
        given(args.network_latency_us, 1e-6, network.latency_s),
    )
    gpu = dataclasses.replace(
        gpu,
        flops_per_s=given(args.tflops, 1e12, gpu.flops_per_s),
        memory_bytes_per_s=given(args.memory_gb_per_s, 1e9, gpu.memory_bytes_per_s),
        inside=inside,
    )
    return Cluster(
        Rates(gpu, args.efficiency, args.memory_efficiency),
        Network(inside, between, args.ranks_per_node),
        args.overlap,
        args.waits_for_sends,
    )


def describe(
    results: list[Result], cluster: Cluster, args: argparse.Namespace, budget: int | None
) -> str:
    """The schemes side by side, then their ranks."""
    first = results[0]
    layout, memory = first.layout, first.scheme.memory
    schedule = "1F1B" if layout.num_chunks == 1 else f"interleaved, overlap {cluster.overlap}"
    gpus = layout.num_ranks * memory.sizes.tp * memory.sizes.cp
    lines = [
        f"{layout.num_layers} layers, P={layout.num_ranks}, V={layout.num_chunks} ({schedule}), "
        f"{memory.num_microbatches} micro-batches, [s, b, h] row of "
        f"{format_bytes(memory.sizes.row_bytes)}",
        f"one replica of {gpus} {args.gpu} GPUs, {args.ranks_per_node} pipeline rank(s) per node, "
        f"network {args.network}",
        "",
        *table([_record(result, first, budget) for result in results]),
        "",
        ASSUMPTIONS,
        *whole_rows_note(memory.sizes.tp, memory.sizes.sequence_parallel),
        "",
        "compute by rank, ms:",
        *table([_ranks(each, [f"{s * MS:.1f}" for s in each.busy_s]) for each in results]),
        "",
        "peak by rank:",
        *table(
            [
                _ranks(each, [format_bytes(rank.peak_bytes) for rank in each.prediction.ranks])
                for each in results
            ]
        ),
    ]
    return "\n".join(lines)


def _record(result: Result, first: Result, budget: int | None) -> dict[str, str]:
    worst = result.prediction.worst
    fits = "" if budget is None or worst.peak_bytes <= budget else " (too much)"
    return {
        "scheme": result.scheme.name,
        "step ms": f"{result.step_s * MS:.1f}",
        f"of {first.scheme.name}": f"{result.step_s / first.step_s:.3f}",
        "compute": f"{result.mean_busy_s * MS:.1f}",
        "imbalance": f"{result.imbalance_s * MS:.1f}",
        "bubble": f"{result.bubble_s * MS:.1f}",
        "exposed": f"{result.exposed_s * MS:.1f}",
        "of peak": f"{result.share_of_peak:.1%}",
        "widest hop": format_bytes(result.scheme.plan.max_rows * _row_bytes(result)),
        "sent": format_bytes(sum(result.bytes_sent)),
        "peak": format_bytes(worst.peak_bytes) + fits,
        "recompute": result.prediction.policy,
    }


def _row_bytes(result: Result) -> int:
    return result.scheme.memory.sizes.row_bytes


def _ranks(result: Result, cells: list[str]) -> dict[str, str]:
    return {"scheme": result.scheme.name, **{f"r{r}": cell for r, cell in enumerate(cells)}}


def _fields(result: Result, budget: int | None) -> dict[str, Any]:
    worst = result.prediction.worst
    return {
        "scheme": result.scheme.name,
        "residual": str(result.scheme.residual),
        "step_ms": result.step_s * MS,
        "compute_ms": result.mean_busy_s * MS,
        "imbalance_ms": result.imbalance_s * MS,
        "bubble_ms": result.bubble_s * MS,
        "bubble_fraction": result.bubble_fraction,
        "exposed_ms": result.exposed_s * MS,
        "tokens_per_s": result.tokens_per_s,
        "share_of_peak": result.share_of_peak,
        "sent_bytes": sum(result.bytes_sent),
        "widest_hop_bytes": result.scheme.plan.max_rows * _row_bytes(result),
        "recompute": result.prediction.policy,
        "peak_bytes": worst.peak_bytes,
        "fits": None if budget is None else worst.peak_bytes <= budget,
        "forward_ms_by_stage": [s * MS for s in result.costs.forward_s],
        "backward_ms_by_stage": [s * MS for s in result.costs.backward_s],
        "per_rank": [
            {
                "rank": rank.rank,
                "compute_ms": result.busy_s[rank.rank] * MS,
                "sent_bytes": result.bytes_sent[rank.rank],
                "peak_bytes": rank.peak_bytes,
                "in_flight": rank.in_flight,
            }
            for rank in result.prediction.ranks
        ],
    }
