# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration as flags, for Megatron's own parser and for reading a command line ahead of it.

Needs neither torch nor Megatron, whose imports take long: what is wrong with our flags is said
before.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_residuals.config import MECHANISMS, ResidualConfig, options_for, readers_of
from megatron_residuals.mechanisms import Mechanism, mechanism_named

MECHANISM_FLAG = "--residual"
SPECS, FROM_FLAGS = "megatron_residuals.specs", "from_flags"
# Of Megatron's own flags none is as close to one of ours as a slip of the finger; a test looks.
SLIP = 0.85
# Flags of a run rather than of the model, as Megatron's arguments name them.
CONVERT_BLOCK_LENGTH = "residual_convert_block_length"
LR_MULT, WD_MULT = "residual_lr_mult", "residual_wd_mult"


def flag_of(field_name: str) -> str:
    """Command-line flag of a field of ``ResidualConfig``."""
    if field_name == "mechanism":
        return MECHANISM_FLAG
    return f"{MECHANISM_FLAG}-{field_name.replace('_', '-')}"


def add_residual_arguments(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """Add a flag for every option of ``ResidualConfig``; usable as an ``extra_args_provider``.

    Flags that are not given stay None, so that defaults are decided in one place.

    Args:
        words: the command line to be parsed, by default this process's: a mechanism of your own
            that it names brings flags along.

    Raises:
        ValueError: it names a mechanism that cannot be found.
        RuntimeError: the parser already has one of the flags (a host with a residual of its own).
    """
    entry = _entry_in(sys.argv if words is None else words)
    ours = [MECHANISM_FLAG, *(flag_of(option.name) for option in options_for(entry))]
    ours += [flag_name(name) for name in (CONVERT_BLOCK_LENGTH, LR_MULT, WD_MULT)]
    taken = [flag for flag in ours if flag in parser._option_string_actions]
    if taken:
        raise RuntimeError(
            f"this Megatron already has {', '.join(taken)}; its own residual and "
            "megatron_residuals cannot be combined"
        )
    group = parser.add_argument_group("residual", "replaced residual connection")
    group.add_argument(
        MECHANISM_FLAG,
        metavar="NAME",
        help=f"what replaces the residual connection: {', '.join(MECHANISMS)}, or module:NAME of "
        "your own",
    )
    for option in options_for(entry):
        readers = ", ".join(readers_of(option.name, *([entry] if entry else [])))
        text = f"{option.text} [{readers}; default: {option.default}]"
        kwargs: dict[str, Any] = {"default": None, "help": text.replace("%", "%%")}
        if option.kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs.update(type=option.kind, choices=option.choices)
        group.add_argument(flag_of(option.name), **kwargs)
    _add_run_arguments(group)
    return parser


def _entry_in(words: Sequence[str]) -> Mechanism | None:
    """The mechanism from outside that a command line names, if it does."""
    outside = named_outside(words)
    return mechanism_named(outside[-1]) if outside else None


def named_outside(words: Sequence[str]) -> list[str]:
    """Every ``module:NAME`` that a command line gives as a mechanism, by flag or by spec."""
    named = [word.partition("=")[2] for word in words if word.startswith(f"{MECHANISM_FLAG}=")]
    for word, after in itertools.pairwise(words):
        if word in (MECHANISM_FLAG, SPECS):
            named.append(after)
    return [name for name in named if ":" in name]


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
        type=_multiplier,
        help="multiplies the learning rate of the mechanism's parameters [default: 1]",
    )
    group.add_argument(
        flag_name(WD_MULT),
        type=_multiplier,
        help="multiplies the weight decay of the mechanism's 2-D projections (its other parameters "
        "have none) [default: 1]",
    )


def _multiplier(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number of at least 0")
    return value


def config_from_args(args: argparse.Namespace, mechanism: str | None = None) -> ResidualConfig:
    """The configuration that parsed arguments describe.

    Args:
        mechanism: the one named by ``--spec``, or None to take it from ``--residual``.

    Raises:
        ValueError: no mechanism or two different ones, or an invalid configuration.
    """
    options: dict[str, Any] = {}
    named = options["mechanism"] = getattr(args, "residual", None) or mechanism
    outside = mechanism_named(named) if ":" in (named or "") else None
    for option in options_for(outside):
        value = getattr(args, f"residual_{option.name}", None)
        if value is not None:
            options[option.name] = value
    if named is None:
        raise ValueError(f"no residual mechanism given; {_how_to_name_one(args)}")
    if mechanism is not None and named != mechanism:
        raise ValueError(
            f"--spec asks for {mechanism!r} and {MECHANISM_FLAG} for {named!r}; give one of the two"
        )
    return ResidualConfig.from_mapping(options)


def _how_to_name_one(args: argparse.Namespace) -> str:
    if hasattr(args, "residual"):
        return f"add {MECHANISM_FLAG} NAME"
    advice = (
        f"this script has no flag {MECHANISM_FLAG}: start it as `python -m megatron_residuals.run "
        f"SCRIPT ... {MECHANISM_FLAG} NAME`, or name the mechanism in place of {FROM_FLAGS}, as in "
        f"--spec {SPECS} mhc"
    )
    if getattr(args, "use_checkpoint_args", False):
        advice += ", and leave out --use-checkpoint-args, which puts the checkpoint's --spec back"
    return advice


class _Reader(argparse.ArgumentParser):
    """Reads a command line that another parser will get."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _reader(words: Sequence[str]) -> argparse.ArgumentParser:
    return add_residual_arguments(_Reader(add_help=False, allow_abbrev=False), words)


def residual_of(words: Sequence[str]) -> ResidualConfig | None:
    """The configuration that a training script's arguments ask for; None where they ask for none.

    Raises:
        ValueError: a value that is not allowed, an invalid configuration, or a ``--spec`` that does
            not go with our flags.
    """
    parser = _reader(words)
    parser.add_argument("--spec", nargs="*")
    known, _ = parser.parse_known_args(words)
    ours = {name for name, value in vars(known).items() if value is not None} - {"spec"}
    if known.spec is None:
        return config_from_args(known) if ours else None
    if known.spec[:1] != [SPECS]:
        if not ours:
            return None
        raise ValueError(
            f"--spec {' '.join(known.spec)} builds its own layers, on which {MECHANISM_FLAG} has "
            f"no effect; leave --spec out, or wrap that spec with {SPECS}.residual_spec"
        )
    if len(known.spec) != 2:
        raise ValueError(f"--spec {SPECS} takes one name behind it; give a mechanism's")
    mechanism = known.spec[1]
    return config_from_args(known, None if mechanism == FROM_FLAGS else mechanism)


def refuse_misspelt(words: Sequence[str]) -> None:
    """Refuse words that can only be meant as flags of ours and are none.

    Raises:
        ValueError: naming each, and the flag that comes closest.
    """
    known = list(_reader(words)._option_string_actions)
    faults = []
    for word in words:
        flag = word.partition("=")[0]
        if flag in known or not flag.startswith("-"):
            continue
        is_ours = flag.startswith((MECHANISM_FLAG, f"--no-{MECHANISM_FLAG[2:]}"))
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6 if is_ours else SLIP)
        if is_ours or near:
            faults.append(flag + "".join(f" (did you mean {name}?)" for name in near))
    if faults:
        raise ValueError(f"there is no flag {', '.join(faults)}; --help lists them")


# What a script that trains another model than those we know imports of Megatron.
OTHER_MODELS = {
    "megatron.core.models.multimodal": "multimodal",
    "megatron.core.models.vision": "vision",
    "megatron.core.models.bert": "BERT",
    "megatron.core.models.T5": "T5",
    "megatron.core.models.retro": "Retro",
}
KNOWN_MODELS = ("gpt_builders", "hybrid_builders", "mamba_builders") + tuple(
    f"megatron.core.models.{name}" for name in ("gpt", "hybrid", "mamba")
)


def refuse_other_models(script: str | Path) -> None:
    """Refuse a script that, by its imports, trains another model than a GPT or a hybrid one.

    Raises:
        ValueError: saying which model, and by what it is known.
    """
    other = other_model(script)
    if other is not None:
        raise ValueError(
            f"{Path(script).name} trains {other}, and the residual connection can be replaced in "
            "GPT and hybrid models only; leave the residual's flags out, or train one of them "
            "(pretrain_gpt.py, pretrain_hybrid.py)"
        )


def other_model(script: str | Path) -> str | None:
    """The model that a script trains, and by what it is known; None for a GPT or a hybrid one."""
    imported = _imports(Path(script))
    other = next((name for name in OTHER_MODELS if _has(imported, name)), None)
    if other is None or any(_has(imported, name) for name in KNOWN_MODELS):
        return None
    return f"a {OTHER_MODELS[other]} model (it imports {other})"


def _has(imported: set[str], package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported)


def _imports(script: Path) -> set[str]:
    """Dotted names that a script imports; none where it cannot be read as Python."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
