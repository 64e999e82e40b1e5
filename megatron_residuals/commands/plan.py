# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals plan`: what crosses every pipeline boundary, in rows and in bytes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from megatron_residuals.commands.arguments import (
    ELEMENT_BYTES,
    Subparsers,
    add_layout_options,
    add_size_options,
    stage_layout,
    whole_rows_note,
)
from megatron_residuals.commands.launch import (
    add_launch_options,
    forecast_of,
    launch_fields,
    with_remarks,
)
from megatron_residuals.config import TRANSPORTS, ResidualConfig
from megatron_residuals.depth import DepthMap
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.text import count_faults, raise_faults

EXAMPLES = """\
examples:
  megatron-residuals plan --layers 96 --block-layers 12 --pp 8 --vpp 4
  megatron-residuals plan --layout 'Et*3|(tt|)*5t*3,L' --block-layers 4 --pp 7
  megatron-residuals plan --layers 32 --streams 4 --pp 4 --vpp 2 \\
      --seq-length 4096 --micro-batch-size 1 --hidden-size 4096 --tp 2 --sequence-parallel --json
"""


def register(commands: Subparsers) -> None:
    """`plan`: what crosses every pipeline boundary."""
    parser = commands.add_parser(
        "plan",
        help="print what crosses every pipeline boundary",
        description="Print what crosses every pipeline boundary, and what every rank keeps, for "
        "one micro-batch. Needs neither a GPU nor torch; a launch behind -- is read by Megatron.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--layers", type=int, metavar="L", help="transformer layers of the model")
    state = parser.add_mutually_exclusive_group()
    state.add_argument("--block-layers", type=int, metavar="K", help="AttnRes block, in layers")
    state.add_argument(
        "--block-sublayers",
        type=int,
        metavar="S",
        help="AttnRes block, in sublayers (attention and MLP count one each; 1 is Full AttnRes)",
    )
    state.add_argument(
        "--streams", type=int, metavar="N", help="HC or mHC streams (1 is the plain residual)"
    )
    state.add_argument(
        "--residual",
        metavar="MECHANISM",
        help="a mechanism, built-in or module:NAME, as text with its options in brackets",
    )
    add("--transport", choices=TRANSPORTS, default="delta", help="AttnRes only (default: delta)")
    add("--json", action="store_true", help="print JSON instead of the table")
    add_layout_options(parser.add_argument_group("layers per stage (default: all equal)"))
    add_size_options(parser.add_argument_group("sizes (give the first three to see bytes)"))
    parser.set_defaults(handler=run_plan)
    add_launch_options(parser, beside=["json"])


def _transfer_plan(args: argparse.Namespace) -> TransferPlan:
    layout = stage_layout(args)
    if args.residual is not None:
        residual = ResidualConfig.parse(args.residual)
        return TransferPlan.for_residual(replace(residual, transport=args.transport), layout)
    if args.streams is not None:
        return TransferPlan.for_streams(layout, args.streams)
    if args.block_layers is not None:
        depth = DepthMap.from_layers(
            layout.num_layers, args.block_layers, layout.sublayers_per_layer
        )
    elif args.block_sublayers is None:
        raise ValueError(
            "give --block-layers, --block-sublayers, --streams or --residual, or a launch behind --"
        )
    else:
        depth = DepthMap(layout.num_layers, args.block_sublayers, layout.sublayers_per_layer)
    return TransferPlan.for_sources(layout, depth, args.transport)


def row_bytes(args: argparse.Namespace) -> int | None:
    """Bytes of one `[s, b, h]` row on one rank; None when no size was given.

    Raises:
        ValueError: only some of the sizes were given, or the ranks do not divide the sequence.
    """
    sizes = {
        "--seq-length": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--hidden-size": args.hidden_size,
    }
    missing = [option for option, size in sizes.items() if size is None]
    if len(missing) == len(sizes):
        return None
    if missing:
        raise ValueError(f"bytes need all three sizes; missing: {', '.join(missing)}.")
    raise_faults("sizes", count_faults(1, **sizes, **{"--tp": args.tp, "--cp": args.cp}))
    parts = args.cp * (args.tp if args.sequence_parallel else 1)
    if args.seq_length % parts:
        raise ValueError(
            f"--seq-length {args.seq_length} does not divide over {parts} ranks (--cp, and --tp "
            f"with --sequence-parallel); use a multiple of {parts}."
        )
    elements: int = args.seq_length // parts * args.micro_batch_size * args.hidden_size
    return elements * ELEMENT_BYTES[args.dtype]


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan that the options, or a launch, describe."""
    forecast = forecast_of(args)
    if forecast is None:
        plan, size = _transfer_plan(args), row_bytes(args)
        whole_rows = whole_rows_note(args.tp, args.sequence_parallel)
    else:
        sizes = forecast.plan.sizes
        plan, size = forecast.transfer_plan, sizes.row_bytes
        whole_rows = whole_rows_note(sizes.tp, sizes.sequence_parallel)
    if not args.json:
        print(with_remarks("\n".join([plan.grid(size), *whole_rows]), forecast))
        return 0
    fields = plan.to_dict()
    if size is not None:
        fields["row_bytes"] = size
        fields["hop_bytes"] = [boundary.rows * size for boundary in plan.boundaries]
        for name in ("rows", "rows_full", "rows_delta", "cache_rows"):
            fields[name.replace("rows", "bytes")] = getattr(plan, name) * size
    print(json.dumps(fields | launch_fields(forecast), indent=2))
    return 0
