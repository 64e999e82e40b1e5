# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration as flags of Megatron's own command line."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_residuals.config import MECHANISMS, ResidualConfig, options_for, readers_of

MECHANISM_FLAG = "--residual"
# Flags of a run rather than of the model, as Megatron's arguments name them.
CONVERT_BLOCK_LENGTH = "residual_convert_block_length"
LR_MULT, WD_MULT = "residual_lr_mult", "residual_wd_mult"


def flag_of(field_name: str) -> str:
    """Command-line flag of a field of ``ResidualConfig``."""
    if field_name == "mechanism":
        return MECHANISM_FLAG
    return f"{MECHANISM_FLAG}-{field_name.replace('_', '-')}"


def add_residual_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add a flag for every option of ``ResidualConfig``; usable as an ``extra_args_provider``.

    Flags that are not given stay None, so that defaults are decided in one place.

    Raises:
        RuntimeError: the parser already has one of the flags (a host with a residual of its own).
    """
    ours = [MECHANISM_FLAG, *(flag_of(option.name) for option in options_for())]
    ours += [flag_name(name) for name in (CONVERT_BLOCK_LENGTH, LR_MULT, WD_MULT)]
    taken = [flag for flag in ours if flag in parser._option_string_actions]
    if taken:
        raise RuntimeError(
            f"this Megatron already has {', '.join(taken)}; its own residual and "
            "megatron_residuals cannot be combined"
        )
    group = parser.add_argument_group("residual", "replaced residual connection")
    group.add_argument(MECHANISM_FLAG, choices=MECHANISMS, help="what replaces the residual")
    for option in options_for():
        text = f"{option.text} [{', '.join(readers_of(option.name))}; default: {option.default}]"
        kwargs: dict[str, Any] = {"default": None, "help": text.replace("%", "%%")}
        if option.kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs.update(type=option.kind, choices=option.choices)
        group.add_argument(flag_of(option.name), **kwargs)
    _add_run_arguments(group)
    return parser


def flag_name(argument: str) -> str:
    """Command-line flag of an argument: ``residual_lr_mult`` -> ``--residual-lr-mult``."""
    return f"--{argument.replace('_', '-')}"


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        flag_name(CONVERT_BLOCK_LENGTH),
        action="store_true",
        default=None,
        help="load AttnRes weights into blocks of another length than they were trained with",
    )
    group.add_argument(
        flag_name(LR_MULT),
        type=float,
        help="multiplies the learning rate of the mechanism's parameters [default: 1]",
    )
    group.add_argument(
        flag_name(WD_MULT),
        type=float,
        help="multiplies the weight decay of the mechanism's 2-D projections (its other parameters "
        "have none) [default: 1]",
    )


def config_from_args(args: argparse.Namespace, mechanism: str | None = None) -> ResidualConfig:
    """The configuration that parsed arguments describe.

    Args:
        mechanism: the one named by ``--spec``, or None to take it from ``--residual``.

    Raises:
        ValueError: no mechanism or two different ones, or an invalid configuration.
    """
    options: dict[str, Any] = {}
    for option in options_for():
        value = getattr(args, f"residual_{option.name}", None)
        if value is not None:
            options[option.name] = value
    named = options["mechanism"] = getattr(args, "residual", None) or mechanism
    if named is None:
        raise ValueError(f"no residual mechanism given; add {MECHANISM_FLAG} NAME")
    if mechanism is not None and named != mechanism:
        raise ValueError(
            f"--spec asks for {mechanism!r} and {MECHANISM_FLAG} for {named!r}; give one of the two"
        )
    return ResidualConfig.from_mapping(options)


def config_from_global_args(mechanism: str | None) -> ResidualConfig:
    """The configuration of the running script: its flags where Megatron parsed any.

    Without Megatron's training loop (library use), or without our flags in its parser, this is the
    mechanism with its defaults.
    """
    return config_from_args(global_args() or argparse.Namespace(), mechanism)


def global_args() -> argparse.Namespace | None:
    """The arguments of Megatron's training loop, or None where it does not run."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
