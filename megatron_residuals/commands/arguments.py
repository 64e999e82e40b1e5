# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands share, under their short names and Megatron's own."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from megatron_residuals.pipeline.layout import StageLayout

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def add_layout_options(group: argparse._ArgumentGroup) -> None:
    """How the model is cut into stages; `stage_layout` reads them."""
    add = group.add_argument
    add("--pp", "--pipeline-model-parallel-size", type=int, default=1, metavar="P", help="ranks")
    add(
        "--vpp",
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        metavar="V",
        help="virtual chunks per rank (default: 1, or what --layout says)",
    )
    add(
        "--layout",
        "--pipeline-model-parallel-layout",
        metavar="TEXT",
        help="Megatron-Core's layout string; --layers and --vpp follow from it",
    )
    add(
        "--first-stage-layers",
        "--decoder-first-pipeline-num-layers",
        type=int,
        metavar="N",
        help="layers of the first pipeline rank, all its chunks together",
    )
    add(
        "--last-stage-layers",
        "--decoder-last-pipeline-num-layers",
        type=int,
        metavar="N",
        help="layers of the last pipeline rank, all its chunks together",
    )
    add(
        "--account-for-embedding-in-pipeline-split",
        action="store_true",
        help="the embedding takes the place of one layer",
    )
    add(
        "--account-for-loss-in-pipeline-split",
        action="store_true",
        help="the loss takes the place of one layer",
    )


def add_size_options(group: argparse._ArgumentGroup) -> None:
    """Sizes of a micro-batch, and the ranks it is split over."""
    add = group.add_argument
    add("--seq-length", type=int, metavar="TOKENS", help="of the whole sequence")
    add("--micro-batch-size", type=int, metavar="B", help="sequences per micro-batch")
    add("--hidden-size", type=int, metavar="H", help="of the model")
    add("--tp", "--tensor-model-parallel-size", type=int, default=1, metavar="T", help="ranks")
    add("--sequence-parallel", action="store_true", help="split the sequence over the --tp ranks")
    add("--cp", "--context-parallel-size", type=int, default=1, metavar="C", help="ranks")
    add("--dtype", choices=ELEMENT_BYTES, default="bf16", help="of activations (default: bf16)")


def stage_layout(args: argparse.Namespace) -> StageLayout:
    """The stages that the options describe; `args.layers` is the depth.

    Raises:
        ValueError: options that contradict each other, or a split that does not come out even.
    """
    uneven = args.first_stage_layers is not None or args.last_stage_layers is not None
    accounted = (
        args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split
    )
    if (args.layout is not None) + uneven + accounted > 1:
        raise ValueError(
            "more than one of --layout, --first/--last-stage-layers and "
            "--account-for-*-in-pipeline-split; each describes all stages, give one."
        )
    if args.layout is not None:
        layout = StageLayout.parse(args.layout, args.pp, args.layers)
        if args.vpp not in (None, layout.num_chunks):
            raise ValueError(
                f"--vpp is {args.vpp}, but --layout has {layout.num_stages} stages for {args.pp} "
                f"ranks, which is {layout.num_chunks} chunks per rank; leave --vpp out."
            )
        return layout
    if args.layers is None:
        raise ValueError("the depth is missing; give --layers, or --layout.")
    num_chunks = 1 if args.vpp is None else args.vpp
    if uneven:
        return StageLayout.uneven(
            args.layers,
            args.pp,
            num_chunks,
            first=args.first_stage_layers,
            last=args.last_stage_layers,
        )
    return StageLayout.even(
        args.layers,
        args.pp,
        num_chunks,
        account_for_embedding=args.account_for_embedding_in_pipeline_split,
        account_for_loss=args.account_for_loss_in_pipeline_split,
    )
