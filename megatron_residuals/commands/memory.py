# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals memory`: what every recompute policy keeps, and which one fits a budget."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import warnings
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
from megatron_residuals.config import MECHANISMS, TRANSPORTS, ResidualConfig
from megatron_residuals.planner.memory import MemoryPlan, Prediction, RankMemory
from megatron_residuals.text import format_bytes, raise_faults, table

if TYPE_CHECKING:
    from megatron_residuals.mcore.training.forecast import Forecast

GIB = 2**30

EXAMPLES = """\
examples:
  megatron-residuals memory --residual block_attnres --block-layers 4 --layers 32 \\
      --hidden-size 4096 --heads 32 --seq-length 4096 --micro-batch-size 1
  megatron-residuals memory --residual mhc --streams 4 --layers 48 --pp 4 --vpp 2 \\
      --microbatches 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu --heads 32 \\
      --query-groups 8 --seq-length 8192 --micro-batch-size 1 --tp 4 --sequence-parallel \\
      --host-layer-bytes 400000000 --budget-gib 60
"""

ASSUMPTIONS = """\
kept, part of it in the residual path (inputs and norms of sublayers, streams, sources), and held
besides by the largest replay: on the rank with the highest peak, one micro-batch, up to the last
layer. peak: all micro-batches in flight there, the largest replay, final norm and logits.
Activations only; weights, gradients, optimizer and the work space of kernels come on top."""
LOCAL_LAYERS = """\
Attention and MLP are those of the host's local, unfused layers without dropout. Layers of
Transformer Engine keep less: measure one and give --host-layer-bytes."""


def register(commands: Subparsers) -> None:
    """`memory`: what every recompute policy keeps."""
    parser = commands.add_parser(
        "memory",
        help="predict what every recompute policy keeps for backward",
        description="Predict the activations that every recompute policy keeps for backward on "
        "every pipeline rank. Needs neither a GPU nor torch, except for --measure; a launch behind "
        "-- is read by Megatron.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--layers", type=int, metavar="L", help="transformer layers of the model")
    add_step_options(parser)
    add("--budget-gib", type=float, metavar="GIB", help="name the cheapest policy that fits")
    add("--measure", action="store_true", help="run the model on the CPU and compare (small ones)")
    add("--json", action="store_true", help="print JSON instead of the table")
    _add_residual_options(parser.add_argument_group("residual"))
    add_layout_options(parser.add_argument_group("layers per stage (default: all equal)"))
    sizes = parser.add_argument_group("sizes (the first three are needed)")
    add_size_options(sizes)
    add_model_options(sizes)
    parser.set_defaults(handler=run_memory)
    add_launch_options(parser, beside=["json", "budget_gib", "host_layer_bytes"])


def _add_residual_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--residual",
        metavar="MECHANISM",
        help=f"{', '.join(MECHANISMS)}, or module:NAME, with options in brackets if any",
    )
    for name, metavar, text in (
        ("block-layers", "K", "AttnRes block, in layers"),
        ("block-sublayers", "S", "AttnRes block, in sublayers"),
        ("streams", "N", "HC or mHC streams (default: 4)"),
    ):
        add(f"--{name}", type=int, metavar=metavar, help=text)
    add(
        "--residual-recompute",
        default="none",
        metavar="POLICY",
        help="the policy that the first fields of the JSON are about (default: none); the table "
        "has all",
    )
    add("--transport", choices=TRANSPORTS, default="delta", help="AttnRes only (default: delta)")


def run_memory(args: argparse.Namespace) -> int:
    """Print the predictions; 1 when a budget is given that no policy fits."""
    forecast = forecast_of(args)
    plan = memory_plan(args) if forecast is None else forecast.plan
    measured = _measure(plan, args) if args.measure else {}
    recommended = None if args.budget_gib is None else plan.cheapest(int(args.budget_gib * GIB))
    if args.json:
        chosen = plan.predict() if forecast is None else forecast.prediction
        fields = _fields(plan, chosen, measured, args.budget_gib)
        print(json.dumps(fields | launch_fields(forecast), indent=2))
    else:
        print(with_remarks(describe(plan, args.budget_gib, measured, forecast), forecast))
    return int(args.budget_gib is not None and recommended is None)


def memory_plan(args: argparse.Namespace) -> MemoryPlan:
    """What the options describe.

    Raises:
        ValueError: a needed size is missing, or something is out of range.
    """
    if args.residual is None:
        raise ValueError("the mechanism is missing; give --residual, or a launch behind --")
    sizes = model_sizes(args, "memory")
    layout = stage_layout(args)
    given = {
        "streams": args.streams,
        "block_layers": args.block_layers,
        "block_sublayers": args.block_sublayers,
        "transport": args.transport if args.transport != "delta" else None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    named = ResidualConfig.parse(args.residual)
    residual = ResidualConfig.from_mapping(
        {**named.as_mapping(), "recompute": args.residual_recompute, **options}
    )
    microbatches = args.pp if args.microbatches is None else args.microbatches
    plan = MemoryPlan(layout, residual, sizes, microbatches, args.microbatch_group_size)
    plan.predict()  # finds what is wrong with the schedule
    return plan


def _measure(plan: MemoryPlan, args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """By policy: kept and peak bytes of the worst rank, measured, and predicted for the same run.

    Raises:
        ValueError: the run is not one that the CPU host can do.
    """
    faults = [] if args.cp == 1 else ["the CPU host has no context parallelism; leave --cp out."]
    if args.host_layer_bytes is not None:
        faults.append("--host-layer-bytes is not of the CPU host's layers; leave it out.")
    if args.pattern is not None:
        faults.append("--pattern is of a hybrid model, and only GPTs are measured; leave it out.")
    raise_faults("--measure", faults)
    # Megatron warns of every accelerator library that is not there, some of it on stdout.
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            from megatron_residuals import cpu_host

            cpu_host.install()
            from megatron_residuals.testing.retained import measure_plan

            return measure_plan(plan, args.dtype)
    finally:
        logging.disable(level)


def policy_names(plan: MemoryPlan) -> list[str]:
    """The policies to show: all, and a group length that was asked for."""
    asked = plan.residual.recompute
    known = {name.partition(":")[0]: name for name in plan.policies}
    return [asked if asked.startswith("group:") and n == "group" else n for n in known.values()]


def describe(
    plan: MemoryPlan,
    budget_gib: float | None = None,
    measured: dict[str, dict[str, int]] | None = None,
    forecast: Forecast | None = None,
) -> str:
    """The table of policies, what a launch itself keeps, the ranks' peaks, the recommendation."""
    stock_full = plan.stock_full
    predictions = [plan.predict(name) for name in policy_names(plan)]
    host_full = plan.host_full(1 if forecast is None else max(1, forecast.host_full))
    others = [host_full, plan.stock, stock_full]
    records = [_record(plan, each, stock_full) for each in (*predictions, *others)]
    layout = plan.layout
    lines = [
        f"{layout.num_layers} layers, {plan.residual}, P={layout.num_ranks}, "
        f"V={layout.num_chunks}, {plan.num_microbatches} micro-batch(es), "
        f"[s, b, h] row of {format_bytes(plan.sizes.row_bytes)}",
        "",
        *table(records),
        "",
        ASSUMPTIONS,
    ]
    if plan.sizes.host_layer_bytes is None:
        lines.append(LOCAL_LAYERS)
    lines += whole_rows_note(plan.sizes.tp, plan.sizes.sequence_parallel)
    if forecast is not None:
        own = forecast.prediction
        peak = format_bytes(own.worst.peak_bytes)
        lines += ["", f"this launch: {own.policy}, {peak} at the peak of rank {own.worst.rank}"]
    if layout.num_ranks > 1:
        lines += ["", "peak by rank:", *table([_peaks(each) for each in predictions])]
    if measured:
        lines += ["", "measured on the CPU, final norm and loss included:"]
        lines += table([_comparison(name, numbers) for name, numbers in measured.items()])
    if budget_gib is not None:
        lines += ["", recommendation(plan, budget_gib)]
    return "\n".join(lines)


def recommendation(plan: MemoryPlan, budget_gib: float) -> str:
    """The cheapest policy that fits, or what the least hungry one needs."""
    found = plan.cheapest(int(budget_gib * GIB))
    if found is not None:
        worst = found.worst
        return (
            f"{budget_gib:g} GiB: the cheapest policy that fits is {found.policy}, with "
            f"{format_bytes(worst.peak_bytes)} at the peak of rank {worst.rank}"
        )
    least = plan.least
    return (
        f"{budget_gib:g} GiB: no policy fits; {least.policy} needs least, "
        f"{format_bytes(least.worst.peak_bytes)} at the peak of rank {least.worst.rank}. Use more "
        "pipeline or tensor-parallel ranks, or smaller micro-batches"
    )


def _record(plan: MemoryPlan, prediction: Prediction, stock_full: Prediction) -> dict[str, str]:
    worst = prediction.worst
    name = prediction.policy
    if lengths := plan.group_lengths(name):
        name = f"group:{'/'.join(map(str, lengths))}"
    return {
        "policy": name,
        "kept": format_bytes(worst.kept_bytes),
        "residual": format_bytes(worst.kept_parts["residual"]),
        "of stock full": f"{worst.kept_bytes / stock_full.ranks[worst.rank].kept_bytes:.2f}",
        "replay": format_bytes(worst.transient_bytes),
        "in flight": str(worst.in_flight),
        "peak": format_bytes(worst.peak_bytes),
        "rank": str(worst.rank),
    }


def _peaks(prediction: Prediction) -> dict[str, str]:
    peaks = {f"r{rank.rank}": format_bytes(rank.peak_bytes) for rank in prediction.ranks}
    return {"policy": prediction.policy, **peaks}


def _comparison(name: str, numbers: dict[str, int]) -> dict[str, str]:
    record = {"policy": name}
    for what in ("kept", "peak"):
        predicted, seen = numbers[f"{what}_bytes_predicted"], numbers[f"{what}_bytes"]
        record |= {
            what: format_bytes(seen),
            f"{what} predicted": format_bytes(predicted),
            f"{what} error": f"{predicted / seen - 1:+.2%}",
        }
    return record


def _fields(
    plan: MemoryPlan,
    chosen: Prediction,
    measured: dict[str, dict[str, int]],
    budget_gib: float | None,
) -> dict[str, Any]:
    fields = _prediction_fields(plan, chosen)
    fields["residual"] = str(plan.residual)
    fields["layout"] = dataclasses.asdict(plan.layout)
    fields["num_microbatches"] = plan.num_microbatches
    fields["sizes"] = dataclasses.asdict(plan.sizes)
    fields["row_bytes"] = plan.sizes.row_bytes
    fields["policies"] = {
        name: _prediction_fields(plan, plan.predict(name)) for name in policy_names(plan)
    }
    fields["host_full"] = _prediction_fields(plan, plan.host_full())
    if measured:
        fields["measured"] = measured
    if budget_gib is not None:
        found = plan.cheapest(int(budget_gib * GIB))
        fields["recommended"] = None if found is None else found.policy
        fields["least_peak_bytes"] = plan.least.worst.peak_bytes
    return fields


def _prediction_fields(plan: MemoryPlan, prediction: Prediction) -> dict[str, Any]:
    stock_full = plan.stock_full.ranks

    def fields(memory: RankMemory) -> dict[str, Any]:
        stock = stock_full[memory.rank]
        return {
            **dataclasses.asdict(memory),
            "kept_bytes_stock_full_recompute": stock.kept_bytes,
            "peak_bytes_stock_full_recompute": stock.peak_bytes,
        }

    worst = fields(prediction.worst)
    worst_rank = worst.pop("rank")
    lengths = plan.group_lengths(prediction.policy)
    return {
        "policy": prediction.policy,
        **worst,
        "worst_rank": worst_rank,
        **({"group_lengths": lengths} if lengths else {}),
        "per_rank": [fields(memory) for memory in prediction.ranks],
    }
