# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a launch will send and keep, read off its command: the plan and the memory prediction.

    python launch/predict.py --gpus 64 -- torchrun ... pretrain_gpt.py --num-layers 96 ...

Needs neither a GPU nor torch. Arguments it does not know are left to Megatron.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_residuals.cli import main as command_line  # noqa: E402
from megatron_residuals.commands.arguments import (  # noqa: E402
    add_layout_options,
    add_model_options,
    add_size_options,
    stage_layout,
)
from megatron_residuals.config import ResidualConfig  # noqa: E402
from megatron_residuals.mcore.arguments import (  # noqa: E402
    add_residual_arguments,
    config_from_args,
)

EXPERTS = """\
note: MLPs are counted as wide as what a token goes through, top-k experts; dispatched tokens and
the router are not counted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print both predictions; 2 if the launch cannot work."""
    words = list(sys.argv[1:] if argv is None else argv)
    options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    front = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    front.add_argument("--gpus", type=int, required=True, help="of all nodes together")
    gpus = front.parse_args(options).gpus
    try:
        args = read(command)
        residual = config_from_args(args)
        shared = [*layout_words(args), *size_words(args)]
        microbatches = microbatches_of(args, gpus)
        plan = ["plan", *shared, *state_words(residual, stage_layout(args).num_layers)]
        memory = [
            "memory",
            *shared,
            *model_words(args),
            *residual_words(residual),
            *("--microbatches", str(microbatches)),
        ]
    except ValueError as error:
        print(f"this launch cannot work: {error}", file=sys.stderr)
        return 2
    for heading, words in (("crosses the pipeline", plan), ("is kept for backward", memory)):
        print(f"\nWhat {heading} (megatron-residuals {' '.join(words)}):\n", flush=True)
        if status := command_line(words):
            return status
    if args.num_experts:
        print(EXPERTS)
    return 0


class LaunchParser(argparse.ArgumentParser):
    """Reads a command that another program will get."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError, since the usage of this parser is nobody's concern."""
        raise ValueError(message)


def read(command: Sequence[str]) -> argparse.Namespace:
    """The arguments of a launch that matter here; what comes last wins.

    Raises:
        ValueError: a ``--residual…`` flag that does not exist, or a value that is not allowed.
    """
    parser = LaunchParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group()
    for add_options in (add_layout_options, add_size_options, add_model_options):
        add_options(group)
    parser.add_argument("--num-layers", dest="layers", type=int)
    for name in ("global-batch-size", "num-experts", "moe-router-topk", "moe-ffn-hidden-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("transformer-impl", "position-embedding-type"):
        parser.add_argument(f"--{name}", default="")
    for name in ("bf16", "fp16"):
        parser.add_argument(f"--{name}", dest="dtype", action="store_const", const=name)
    add_residual_arguments(parser)
    parser.set_defaults(dtype="fp32", residual="residual")
    args, others = parser.parse_known_args(command)
    if unknown := [word for word in others if word.startswith(("--residual", "--no-residual"))]:
        raise ValueError(f"there are no such flags: {', '.join(unknown)}")
    return args


def microbatches_of(args: argparse.Namespace, gpus: int) -> int:
    """Micro-batches of one replica in a step.

    Raises:
        ValueError: GPUs or the global batch do not divide.
    """
    replica = args.tp * args.pp * args.cp
    if gpus % replica:
        raise ValueError(
            f"{gpus} GPUs are no multiple of the {replica} of one replica (TP {args.tp} x PP "
            f"{args.pp} x CP {args.cp}); change NUM_NODES, GPUS_PER_NODE, or the layout."
        )
    at_once = args.micro_batch_size * (gpus // replica)
    if args.global_batch_size % at_once:
        raise ValueError(
            f"GLOBAL_BATCH_SIZE {args.global_batch_size} is no multiple of {at_once}, one "
            f"micro-batch on each of {gpus // replica} replica(s)."
        )
    return int(args.global_batch_size) // at_once


def given(args: argparse.Namespace, **options: str) -> list[str]:
    """Words for the options that have a value, by the name of their argument."""
    words = []
    for name, option in options.items():
        value = getattr(args, name)
        if value is True:
            words.append(option)
        elif value not in (None, False):
            words += [option, str(value)]
    return words


def layout_words(args: argparse.Namespace) -> list[str]:
    """How the model is cut into stages."""
    return given(
        args,
        layers="--layers",
        pp="--pp",
        vpp="--vpp",
        layout="--layout",
        first_stage_layers="--first-stage-layers",
        last_stage_layers="--last-stage-layers",
        account_for_embedding_in_pipeline_split="--account-for-embedding-in-pipeline-split",
        account_for_loss_in_pipeline_split="--account-for-loss-in-pipeline-split",
    )


def size_words(args: argparse.Namespace) -> list[str]:
    """Sizes of a row."""
    return given(
        args,
        seq_length="--seq-length",
        micro_batch_size="--micro-batch-size",
        hidden_size="--hidden-size",
        tp="--tp",
        sequence_parallel="--sequence-parallel",
        cp="--cp",
        dtype="--dtype",
    )


def model_words(args: argparse.Namespace) -> list[str]:
    """Sizes of attention and MLP."""
    if args.num_experts:
        args.ffn_hidden_size = args.moe_router_topk * args.moe_ffn_hidden_size
    if args.transformer_impl == "transformer_engine" and args.host_layer_bytes is None:
        args.flash_attention = True
    args.no_rope = args.position_embedding_type not in ("rope", "yarn", "mrope")
    return given(
        args,
        heads="--heads",
        query_groups="--query-groups",
        ffn_hidden_size="--ffn-hidden-size",
        swiglu="--swiglu",
        no_rope="--no-rope",
        vocab_size="--vocab-size",
        flash_attention="--flash-attention",
        host_layer_bytes="--host-layer-bytes",
    )


def state_words(residual: ResidualConfig, num_layers: int) -> list[str]:
    """What crosses a boundary, as `plan` wants it."""
    depth = residual.depth_map(num_layers)
    if depth is not None:
        sublayers = str(depth.block_sublayers)
        return ["--block-sublayers", sublayers, "--transport", residual.transport]
    return ["--streams", str(residual.streams if residual.is_streams else 1)]


def residual_words(residual: ResidualConfig) -> list[str]:
    """The mechanism, as `memory` wants it."""
    words = ["--residual", residual.mechanism]
    if residual.is_streams:
        words += ["--streams", str(residual.streams)]
    for name in ("block_layers", "block_sublayers"):
        if getattr(residual, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(residual, name))]
    if residual.is_sources:
        words += ["--transport", residual.transport]
    return [*words, "--residual-recompute", residual.recompute]


if __name__ == "__main__":
    sys.exit(main())
