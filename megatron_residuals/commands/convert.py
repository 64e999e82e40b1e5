# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals convert`: checkpoints of plain models, and parameters under public names."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_residuals.commands.arguments import Subparsers
from megatron_residuals.config import ResidualConfig
from megatron_residuals.files import refuse_existing
from megatron_residuals.flags import (
    CONVERT_BLOCK_LENGTH,
    MECHANISM_FLAG,
    add_residual_arguments,
    config_from_args,
)
from megatron_residuals.settings import compare_settings, settings_of
from megatron_residuals.text import first_few, raise_faults, table

if TYPE_CHECKING:
    from megatron_residuals.interchange import ModelShape
    from megatron_residuals.interchange.stored import Stored

EXAMPLES = """\
examples:
  a plain model becomes one with Block AttnRes (then: --load OUTPUT --finetune)
    megatron-residuals convert checkpoints/dense checkpoints/attnres \\
        --residual block_attnres --residual-block-layers 4
  parameters of the residual alone, under the names of DeepSeek-V4 or Kimi-K3
    megatron-residuals convert checkpoints/mhc mhc.safetensors --export
  a plain model, with the residual's parameters from such a file
    megatron-residuals convert checkpoints/dense checkpoints/mhc --import-from mhc.safetensors \\
        --residual mhc --residual-mhc-convention dsv4
  an exported model, trained on elsewhere, back into the format of the run
    megatron-residuals convert checkpoints/mhc checkpoints/back --import-from model_mhc
"""
DESCRIPTION = """\
Add the parameters of a residual to the checkpoint of a plain model, so that it computes what the
plain model computes (up to the eps of the norms); or write and read them under public names.
INPUT and OUTPUT are a Megatron checkpoint folder (of all iterations or of one; torch_dist, or torch
of one rank), a .pt or a .safetensors file. INPUT stays as it is, and OUTPUT must not exist. Of
pickled files only plain data and Megatron's own classes are read, unless you say --trust-input."""


def register(commands: Subparsers) -> None:
    """`convert`: plain checkpoints, and public names."""
    parser = commands.add_parser(
        "convert",
        help="add a residual to a plain checkpoint; export, import",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", metavar="INPUT", type=Path, help="the checkpoint to start from")
    add("output", metavar="OUTPUT", type=Path, help="the checkpoint, or file, to write")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--export",
        action="store_true",
        help="write the residual's parameters alone, under public names, to OUTPUT.safetensors",
    )
    what.add_argument(
        "--import-from",
        type=Path,
        metavar="FILE",
        help="take the residual's parameters from a safetensors file, or a folder of them, with "
        "public names, instead of their initial values; or all parameters from a folder that "
        "megatron-residuals export wrote, INPUT being a checkpoint of the same model",
    )
    add("--dry-run", action="store_true", help="print what would be done, and write nothing")
    add("--num-layers", type=int, metavar="L", help="where the keys do not tell")
    add("--hidden-size", type=int, metavar="H", help="where the keys do not tell")
    add(
        "--convert-convention",
        action="store_true",
        help="with --import-from: take mHC parameters over into the other convention",
    )
    add_trust_option(parser)
    add_residual_arguments(parser)
    parser.set_defaults(handler=run_convert)


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """The flag without which no file of unknown origin is unpickled."""
    parser.add_argument(
        "--trust-input",
        action="store_true",
        help="read the checkpoint even if it asks for more than plain data and Megatron's own "
        "classes; that can run any code, so only for files whose origin you trust",
    )


def run_convert(args: argparse.Namespace) -> int:
    """Convert, and print what was added; 0."""
    return print_lines(_convert(args))


def print_lines(found: Iterable[str]) -> int:
    """Do what yields these lines, then print them; 0.

    Raises:
        ValueError: also where a library is not installed, or torch fails.
    """
    try:
        with host_is_quiet():
            lines = list(found)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    print("\n".join(lines))
    return 0


@contextlib.contextmanager
def host_is_quiet() -> Iterator[None]:
    """Unpickling imports Megatron, which warns of every accelerator library that is not there."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


def _convert(args: argparse.Namespace) -> Iterator[str]:
    from megatron_residuals.interchange import ModelShape, open_checkpoint
    from megatron_residuals.interchange.huggingface.folder import is_exported
    from megatron_residuals.interchange.pickles import Trust

    if not args.dry_run:
        refuse_existing(args.output)
    source = open_checkpoint(args.input, Trust(args.trust_input, host_classes))
    source.refuse_inside(args.output)
    shapes = source.checkpoint.shapes
    shape = ModelShape.of(
        shapes, num_layers=args.num_layers, hidden_size=args.hidden_size, source=args.input
    )
    yield (
        f"input     {source.path / source.inside}: {source.checkpoint.kind}, "
        f"{shape.num_layers} layers, hidden size {shape.hidden_size}, {len(shapes)} tensors"
    )
    if args.import_from is not None and is_exported(args.import_from):
        yield from _bring_back(args, source)
    else:
        yield from (_export if args.export else _extend)(args, source, shape)


def host_classes() -> Sequence[Callable[..., object]]:
    """What Megatron itself lets checkpoints ask for, where it is installed."""
    try:
        from megatron.core.safe_globals import SAFE_GLOBALS
    except Exception:  # a half-installed host raises anything
        return ()
    return tuple(item for item in SAFE_GLOBALS if callable(item))


def _extend(args: argparse.Namespace, source: Stored, shape: ModelShape) -> Iterator[str]:
    """Initial or imported parameters into a checkpoint of the same kind."""
    from megatron_residuals.interchange import (
        initial_parameters,
        is_residual_key,
        read_residual,
        shaped_for,
    )
    from megatron_residuals.interchange.public_file import taken_from_flags
    from megatron_residuals.interchange.stored import not_finite

    config = _asked_for(args)
    present = [key for key in source.checkpoint.shapes if is_residual_key(key)]
    if present and args.import_from is None:
        raise ValueError(
            f"{args.input} already has the parameters of a residual, {present[0]} among them; "
            "--export writes them to a file, --import-from replaces them"
        )
    if args.import_from is None:
        parameters = initial_parameters(config, shape.num_layers, shape.hidden_size)
    else:
        parameters = read_residual(
            args.import_from,
            config,
            shape.num_layers,
            shape.hidden_size,
            convert_convention=args.convert_convention,
            convert_block_length=bool(getattr(args, CONVERT_BLOCK_LENGTH)),
        )
    added = shaped_for(parameters, shape)
    other = sorted(set(present) - set(added))
    if other:
        raise ValueError(f"{args.input} has parameters of another residual, {other[0]} among them")
    yield f"residual  {config}"
    if args.import_from is not None:
        unsaid = taken_from_flags(args.import_from, config, shape.num_layers)
        if unsaid:
            yield f"note      {args.import_from} does not say {', '.join(unsaid)}: as your flags"
    yield from _table(added, source)
    kept = ((key, piece) for key, piece in source.checkpoint.pieces() if key not in added)
    yield from _warnings(not_finite(itertools.chain(added.items(), kept)))
    if not args.dry_run:
        record = settings_of(config, shape.num_layers)
        source.write_with(args.output, added, record, _run_arguments(args))
    yield from _end(args, source)


def _bring_back(args: argparse.Namespace, source: Stored) -> Iterator[str]:
    """An exported model into a checkpoint of the same kind."""
    from megatron_residuals.commands.export import bring_back

    yield from bring_back(args, source)
    yield from _end(args, source)


def _end(args: argparse.Namespace, source: Stored) -> Iterator[str]:
    left_out = source.checkpoint.left_out()
    yield from [f"left out  {left_out}"] if left_out else []
    yield _written(args)
    yield "use       --load OUTPUT --finetune, with the same --residual… flags" + (
        "; or --no-load-optim to go on counting iterations" if left_out else ""
    )


def _export(args: argparse.Namespace, source: Stored, shape: ModelShape) -> Iterator[str]:
    """The residual's parameters under public names."""
    from megatron_residuals.interchange import (
        by_layer,
        initial_parameters,
        is_residual_key,
        shaped_for,
        write_residual,
    )
    from megatron_residuals.interchange.names import shape_faults
    from megatron_residuals.interchange.public_file import export_residual
    from megatron_residuals.interchange.stored import not_finite
    from megatron_residuals.interchange.tensor_file import SUFFIX

    if args.output.suffix != SUFFIX:
        raise ValueError(f"{args.output}: --export writes a file that ends in {SUFFIX}")
    present = {k: s for k, s in source.checkpoint.shapes.items() if is_residual_key(k)}
    if not present:
        raise ValueError(f"{args.input} has no parameters of a residual to export")
    config = config_of(args, source, shape)
    initial = initial_parameters(config, shape.num_layers, shape.hidden_size)
    wanted = {key: tensor.shape for key, tensor in shaped_for(initial, shape).items()}
    raise_faults(str(args.input), shape_faults(present, wanted))
    parameters = by_layer(source.checkpoint.read(is_residual_key), shape)
    tensors, layout = export_residual(parameters, config, shape.num_layers)
    if not args.dry_run:
        write_residual(args.output, parameters, config, shape.num_layers)
    yield f"residual  {config}"
    yield f"layout    {layout}, {len(tensors)} tensors"
    yield from _warnings(not_finite(parameters.items()))
    yield _written(args)


def _asked_for(args: argparse.Namespace) -> ResidualConfig:
    config = config_from_args(args)
    if config.entry.is_stock:
        raise ValueError(f"{MECHANISM_FLAG} residual has no parameters to add")
    return config


def config_of(args: argparse.Namespace, source: Stored, shape: ModelShape) -> ResidualConfig:
    """The residual of a checkpoint, from its record; without one, from the flags."""
    from megatron_residuals.interchange.public_file import config_of as recorded

    record = source.checkpoint.settings()
    if record is None:
        if args.residual is None:
            raise ValueError(
                f"{args.input} does not say what its residual is; give {MECHANISM_FLAG} NAME and "
                "its options"
            )
        return _asked_for(args)
    if args.residual is not None:
        faults = compare_settings(record, settings_of(_asked_for(args), shape.num_layers))
        if faults:
            raise ValueError(f"{args.input} is of another residual: {'; '.join(faults)}")
    try:
        config = recorded(record)
    except ValueError as error:
        reasons = "; ".join(line.strip(" -") for line in str(error).splitlines())
        raise ValueError(f"{args.input} has a settings record with faults: {reasons}") from None
    # a record may lack settings, whose defaults need not be what it was trained with
    faults = compare_settings(record, settings_of(config, shape.num_layers))
    raise_faults(f"{args.input}: its settings record", faults)
    return config


def _run_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags, as a run that saved the new checkpoint would have recorded them."""
    name = MECHANISM_FLAG.lstrip("-")
    return {
        key: value
        for key, value in vars(args).items()
        if (key == name or key.startswith(f"{name}_")) and value is not None
    }


def _table(added: Mapping[str, Any], source: Stored) -> Iterator[str]:
    records = []
    for key, tensor in added.items():
        low, high = tensor.min().item(), tensor.max().item()
        records.append(
            {
                "added": key,
                "shape": str(list(tensor.shape)),
                "dtype": str(tensor.dtype).split(".")[-1],
                "values": f"{low:g}" if low == high else f"{low:g} … {high:g}",
            }
        )
    yield from table(records, left=records[0])
    total = sum(tensor.numel() for tensor in added.values())
    shapes = source.checkpoint.shapes
    there = sum(math.prod(shape) for key, shape in shapes.items() if key not in added)
    share = f", {total / there:+.2%}" if there else ""
    yield f"total     {total:,} parameters in {len(added)} tensors{share}"


def _warnings(names: list[str]) -> Iterator[str]:
    yield from (f"warning   NaN or infinite values: {name}" for name in first_few(names))


def _written(args: argparse.Namespace) -> str:
    return f"output    {args.output}" + (" (dry run: not written)" if args.dry_run else "")
