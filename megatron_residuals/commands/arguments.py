# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands share: a first look at a model that is not a launch yet."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TypeAlias

from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.pattern import pattern_layout
from megatron_residuals.planner.sizes import ModelSizes, flash_layer_bytes
from megatron_residuals.text import raise_faults

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
HEAD_SIZE = 128  # of models whose number of heads is not given


def add_layout_options(group: argparse._ArgumentGroup) -> None:
    """How the model is cut into stages; `stage_layout` reads them."""
    add = group.add_argument
    add("--pp", type=int, default=1, metavar="P", help="ranks")
    add(
        "--vpp",
        type=int,
        metavar="V",
        help="virtual chunks per rank (default: 1, or what --layout says)",
    )
    add(
        "--layout",
        metavar="TEXT",
        help="Megatron-Core's layout string; --layers and --vpp follow from it",
    )
    add(
        "--pattern",
        metavar="TEXT",
        help="Megatron-Core's pattern of a hybrid model, with its stages; likewise",
    )
    add(
        "--first-stage-layers",
        type=int,
        metavar="N",
        help="layers of the first pipeline rank, all its chunks together",
    )
    add(
        "--last-stage-layers",
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


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Micro-batches of a step, and their groups in an interleaved schedule."""
    add = parser.add_argument
    add("--microbatches", type=int, metavar="M", help="per step (default: the ranks of --pp)")
    add(
        "--microbatch-group-size",
        type=int,
        metavar="G",
        help="consecutive micro-batches of one virtual chunk (default: the ranks of --pp)",
    )


def add_size_options(group: argparse._ArgumentGroup) -> None:
    """Sizes of a micro-batch, and the ranks it is split over."""
    add = group.add_argument
    add("--seq-length", type=int, metavar="TOKENS", help="of the whole sequence")
    add("--micro-batch-size", type=int, metavar="B", help="sequences per micro-batch")
    add("--hidden-size", type=int, metavar="H", help="of the model")
    add("--tp", type=int, default=1, metavar="T", help="ranks")
    add("--sequence-parallel", action="store_true", help="split the sequence over the --tp ranks")
    add("--cp", type=int, default=1, metavar="C", help="ranks")
    add("--dtype", choices=ELEMENT_BYTES, default="bf16", help="of activations (default: bf16)")


def whole_rows_note(tp: int, sequence_parallel: bool) -> list[str]:
    """A line for the output where tensor-parallel ranks do not share the residual path's rows."""
    if tp < 2 or sequence_parallel:
        return []
    return [
        f"note: without --sequence-parallel each of the {tp} tensor-parallel ranks computes, keeps "
        f"and sends whole rows of the residual path, {tp} times as much as with it."
    ]


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Sizes of attention and MLP; `model_sizes` reads them and those of `add_size_options`."""
    add = group.add_argument
    add(
        "--heads",
        type=int,
        metavar="A",
        help="attention heads; default: of size 128",
    )
    add("--query-groups", type=int, metavar="G", help="default: --heads")
    add("--ffn-hidden-size", type=int, metavar="F", help="default: 4 H; with --swiglu as Megatron")
    add("--swiglu", action="store_true", help="gated MLP")
    add("--no-rope", action="store_true", help="no rotary positions")
    add("--vocab-size", type=int, default=0, metavar="V", help="default: logits are left out")
    kept = group.add_mutually_exclusive_group()
    kept.add_argument(
        "--host-layer-bytes",
        type=int,
        metavar="BYTES",
        help="kept for backward by one layer's attention and MLP, as measured",
    )
    kept.add_argument(
        "--flash-attention",
        action="store_true",
        help="estimate them for fused layers with flash attention (default: the host's local ones)",
    )


def stage_layout(args: argparse.Namespace) -> StageLayout:
    """The stages that the options describe; `args.layers` is the depth.

    Raises:
        ValueError: options that contradict each other, or a split that does not come out even.
    """
    uneven = args.first_stage_layers is not None or args.last_stage_layers is not None
    accounted = (
        args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split
    )
    given = (args.layout is not None) + uneven + accounted
    if given > 1 or (args.pattern is not None and given > uneven):
        raise ValueError(
            "more than one of --layout, --pattern, --first/--last-stage-layers and "
            "--account-for-*-in-pipeline-split; each describes all stages, give one."
        )
    if args.layout is not None:
        return _checked(StageLayout.parse(args.layout, args.pp, args.layers), args, "--layout")
    if args.pattern is not None:
        first, last = args.first_stage_layers, args.last_stage_layers
        layout = pattern_layout(args.pattern, args.pp, first=first, last=last)
        return _checked(layout, args, "--pattern")
    if args.layers is None:
        raise ValueError("the depth is missing; give --layers, --layout or --pattern.")
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


def _checked(layout: StageLayout, args: argparse.Namespace, option: str) -> StageLayout:
    """The layout, if nothing that was given beside the option contradicts it."""
    if args.layers not in (None, layout.num_layers):
        raise ValueError(f"--layers is {args.layers}, but {option} has {layout.num_layers}.")
    if args.vpp not in (None, layout.num_chunks):
        raise ValueError(
            f"--vpp is {args.vpp}, but {option} has {layout.num_stages} stages for {args.pp} "
            f"ranks, which is {layout.num_chunks} chunks per rank; leave --vpp out."
        )
    return layout


def model_sizes(args: argparse.Namespace, command: str) -> ModelSizes:
    """What the options of `add_size_options` and `add_model_options` describe.

    Raises:
        ValueError: a needed size is missing, or something is out of range.
    """
    needed = ("seq_length", "micro_batch_size", "hidden_size")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(args, name) is None]
    raise_faults(command, [f"missing: {', '.join(missing)}."] if missing else [])
    ffn = args.ffn_hidden_size
    if ffn is None:
        # as Megatron's argument parser completes it
        ffn = int(4 * args.hidden_size * 2 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
    sizes = ModelSizes(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        hidden_size=args.hidden_size,
        ffn_hidden_size=ffn,
        num_heads=args.heads or max(1, args.hidden_size // HEAD_SIZE),
        query_groups=args.query_groups,
        gated=args.swiglu,
        rope=not args.no_rope,
        vocab_size=args.vocab_size,
        tp=args.tp,
        sequence_parallel=args.sequence_parallel,
        cp=args.cp,
        element_bytes=ELEMENT_BYTES[args.dtype],
        host_layer_bytes=args.host_layer_bytes,
    )
    if not args.flash_attention:
        return sizes
    if args.pattern is not None:
        return dataclasses.replace(sizes, fused="flash")
    return dataclasses.replace(sizes, host_layer_bytes=flash_layer_bytes(sizes))
