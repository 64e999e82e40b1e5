# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals export`: a trained model as a folder that transformers loads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_residuals.commands.arguments import Subparsers
from megatron_residuals.commands.convert import (
    add_trust_option,
    config_of,
    host_classes,
    print_lines,
)
from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import add_residual_arguments
from megatron_residuals.settings import settings_of
from megatron_residuals.text import first_few, raise_faults

if TYPE_CHECKING:
    from megatron_residuals.interchange import ModelShape
    from megatron_residuals.interchange.huggingface.tensors import Part
    from megatron_residuals.interchange.stored import Stored

DESCRIPTION = """\
Write the model of a checkpoint as a folder for transformers: AutoModelForCausalLM.from_pretrained(
FOLDER, trust_remote_code=True), without Megatron and without this package. CHECKPOINT is a folder
that Megatron saved (torch_dist of any parallel layout, or torch of one rank) or a .pt file with the
arguments of its run. What the exported model cannot express is refused before anything is
written."""


def register(commands: Subparsers) -> None:
    """`export`: a folder for transformers."""
    parser = commands.add_parser(
        "export",
        help="write a trained model as a folder that transformers loads",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", metavar="CHECKPOINT", type=Path, help="the checkpoint of the trained model")
    add("output", metavar="FOLDER", type=Path, help="the folder to write")
    add("--to", choices=["hf"], required=True, help="whose format: that of Hugging Face")
    add("--tokenizer", type=Path, metavar="PATH", help="a folder whose tokenizer is copied")
    add("--shard-gib", type=float, default=4.0, metavar="GIB", help="size of a file (default: 4)")
    add(
        "--verify",
        action="store_true",
        help="compare every tensor written with the checkpoint, bit for bit",
    )
    add("--force", action="store_true", help="replace FOLDER if it is an exported model")
    add_trust_option(parser)
    add_residual_arguments(parser)
    parser.set_defaults(handler=run_export)


def run_export(args: argparse.Namespace) -> int:
    """Export, and print what was written; 0."""
    return print_lines(_export(args))


class Form(NamedTuple):
    """What the model of a checkpoint is outside.

    Attributes:
        config: of ``ResidualGPTConfig``, the settings of the residual among it.
        parts: the tensors of the checkpoint, and their names outside.
    """

    shape: ModelShape
    residual: ResidualConfig
    config: dict[str, Any]
    parts: list[Part]


def _form_of(args: argparse.Namespace, source: Stored) -> Form:
    from megatron_residuals.interchange import ModelShape, is_residual_key
    from megatron_residuals.interchange.huggingface.architecture import model_config
    from megatron_residuals.interchange.huggingface.tensors import parts_of
    from megatron_residuals.interchange.initial import initial_parameters, shaped_for
    from megatron_residuals.interchange.names import shape_faults

    checkpoint = source.checkpoint
    arguments = checkpoint.arguments()
    if arguments is None:
        raise ValueError(
            f"{args.input} does not hold the arguments of its run, which say what its tensors are; "
            "give the folder of a checkpoint that Megatron's training saved"
        )
    shapes = checkpoint.shapes
    shape = ModelShape.of(shapes, source=args.input)
    found = {key: size for key, size in shapes.items() if is_residual_key(key)}
    residual = ResidualConfig("residual")
    if found or checkpoint.settings() is not None or args.residual is not None:
        residual = config_of(args, source, shape)
    initial = initial_parameters(residual, shape.num_layers, shape.hidden_size)
    wanted = {key: tensor.shape for key, tensor in shaped_for(initial, shape).items()}
    raise_faults(str(args.input), shape_faults(found, wanted))
    rows = shapes[f"{shape.prefix}embedding.word_embeddings.weight"][0]
    config = model_config(arguments, rows, args.input)
    config["residual"] = settings_of(residual, shape.num_layers)
    return Form(shape, residual, config, parts_of(shapes, shape, config, args.input))


def _export(args: argparse.Namespace) -> Iterator[str]:
    from megatron_residuals.interchange import open_checkpoint
    from megatron_residuals.interchange.huggingface import folder
    from megatron_residuals.interchange.pickles import Trust

    if args.shard_gib <= 0:
        raise ValueError(f"--shard-gib is {args.shard_gib}; it must be above 0")
    folder.refuse_foreign(args.output, args.force)
    source = open_checkpoint(args.input, Trust(args.trust_input, host_classes))
    source.refuse_inside(args.output)
    checkpoint, form = source.checkpoint, _form_of(args, source)
    shards = folder.write_folder(
        args.output,
        checkpoint,
        form.parts,
        form.config,
        folder.exported_module(form.residual),
        tokenizer=args.tokenizer,
        shard_bytes=int(args.shard_gib * 2**30),
    )
    layers = form.shape.num_layers
    yield f"input     {source.path / source.inside}: {checkpoint.kind}, {layers} layers"
    yield f"residual  {form.residual}"
    if args.verify:
        wrong = list(folder.differing(args.output, checkpoint, form.parts, form.config))
        if wrong:
            raise ValueError(f"{args.output} differs from {args.input}: {first_few(wrong)}")
        yield f"verified  {sum(len(part.names) for part in form.parts)} tensors, bit for bit"
    yield f"output    {args.output}: {shards} file{'s' * (shards != 1)} of tensors"


def bring_back(args: argparse.Namespace, source: Stored) -> Iterator[str]:
    """``convert --import-from FOLDER``: a checkpoint with all tensors of an exported model."""
    from megatron_residuals.interchange.huggingface import back
    from megatron_residuals.interchange.stored import not_finite

    form = _form_of(args, source)
    back.refuse_other(args.import_from, form.parts, form.config)
    tensors = back.read_back(args.import_from, form.parts, form.config)
    yield f"residual  {form.residual}"
    yield f"replaced  {len(tensors)} tensors, all of the model"
    yield from (f"warning   NaN or infinite: {name}" for name in not_finite(tensors.items()))
    if not args.dry_run:
        source.write_with(args.output, tensors, form.config["residual"], {})
