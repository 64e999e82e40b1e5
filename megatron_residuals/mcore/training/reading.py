# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A launch as the installed Megatron reads it: its own parser, its checks, its configuration.

The user's script runs up to the point at which Megatron has validated the arguments and counted
the micro-batches, so that options and defaults of the script's own are in it. Nothing behind that
point runs: no process group, no tokenizer, no model.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from packaging.version import Version

from megatron_residuals.flags import MECHANISM_FLAG, add_residual_arguments

# What launches for GPUs are checked against on a machine without it.
ASSUMED_TE = "2.20"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
NO_CHECKPOINT = "Checkpoint not found to provide arguments"  # printed by the host
NO_CHECKPOINT_NOTE = """\
with --use-checkpoint-args the launch takes arguments from a checkpoint that is not here"""
RAMP = "rampup_samples_per_increment"  # of the counter of micro-batches


class HostRefusalError(ValueError):
    """The host would end this launch; the message has the host's words, in one line."""


@dataclass(frozen=True)
class Reading:
    """What the host has made of a launch.

    Attributes:
        args: the host's namespace, validated.
        config: the host's ``TransformerConfig``.
        microbatches: of one replica in a step, in the order a growing batch goes through them.
        of_the_script: options given that the script, not the host, has in its parser.
        unknown: options that the parser does not know, where only the host's could be asked.
        notes: what was assumed, a line each.
    """

    args: argparse.Namespace
    config: Any
    microbatches: tuple[int, ...]
    of_the_script: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def read_launch(script: Path, argv: Sequence[str], gpus: int, *, for_gpus: bool = True) -> Reading:
    """Let the host read the command line of a training script.

    A script that is not there, or that fails before the host parses anything (an import that this
    machine lacks), is passed over: the host's parser alone reads the arguments, and a note says so.

    Args:
        gpus: ranks of all nodes together.
        for_gpus: check as on a machine with Transformer Engine, whatever this one has.

    Raises:
        HostRefusalError: what the host, or the script, has against this launch.
    """
    parsing, notes, printed = _Parsing(), [], Printed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet(printed))
        stack.enter_context(_as_rank_zero(script, argv, gpus))
        stack.enter_context(_stopped_behind_arguments(parsing))
        if for_gpus:
            notes += stack.enter_context(with_transformer_engine())
        with in_the_hosts_words(printed):
            fault = _run(script)
            if fault is not None:
                notes.append(f"{fault}; Megatron's parser alone has read the arguments")
                _parse_alone()
            args, config, (microbatches, batch_notes) = _args(), _config(), _microbatches()
        if NO_CHECKPOINT in printed.getvalue():
            notes.append(NO_CHECKPOINT_NOTE)
    options = {word.partition("=")[0] for word in argv}
    return Reading(
        args,
        config,
        microbatches,
        of_the_script=tuple(sorted(parsing.of_the_script & options)),
        unknown=parsing.unknown,
        notes=(*notes, *batch_notes),
    )


class Printed(io.StringIO):
    """What a script prints. Its loggers may hold on to this, so it is never closed."""

    def fileno(self) -> int:
        """Of a true file, which some scripts want; what is written to it is lost."""
        return _nowhere()


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


@contextlib.contextmanager
def quiet(printed: Printed) -> Iterator[None]:
    """Without what the host logs, warns of and prints: mostly accelerator libraries it misses."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(printed):
                yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def in_the_hosts_words(printed: Printed) -> Iterator[None]:
    """Turns whatever the host raises, or prints before it exits, into one line.

    Raises:
        HostRefusalError: the host has raised something, or ended the process.
    """
    try:
        yield
    except HostRefusalError:
        raise
    except SystemExit as error:
        lines = printed.getvalue().strip().splitlines() or [f"it ends with status {error.code}"]
        words = lines[-1].partition(": error: ")[2] or lines[-1]  # argparse names the script
        raise _refusal(words, printed) from error
    except Exception as error:
        raise _refusal(_words(error), printed) from error


def _refusal(words: str, printed: Printed) -> HostRefusalError:
    note = f" ({NO_CHECKPOINT_NOTE})" if NO_CHECKPOINT in printed.getvalue() else ""
    return HostRefusalError(f"Megatron refuses this launch: {words}{note}")


def _words(error: Exception) -> str:
    """The message in one line; without one, the line of source that has failed."""
    kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
    text = " ".join(str(error).split())
    if text:
        return kind + text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{kind}{frame.line} (line {frame.lineno} of {Path(frame.filename).name})"


class _ArgumentsAreRead(BaseException):
    """Ends a script once the host has its arguments; no ``except Exception`` may stop it."""


@dataclass
class _Parsing:
    """What the latest parsing of a command line has shown."""

    of_the_script: set[str] = field(default_factory=set)
    unknown: tuple[str, ...] = ()


def _run(script: Path) -> str | None:
    """Run a script until the host has its arguments; or say why it has not come so far."""
    if not script.is_file():
        return f"there is no file {script}"
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _ArgumentsAreRead:
        return None
    except Exception as error:
        if _raised_by_host(error.__traceback__):
            raise
        return f"{script.name} cannot be run here ({_words(error)})"
    return f"{script.name} has ended without asking Megatron for its arguments"


def _raised_by_host(trace: TracebackType | None) -> bool:
    """Whether a function of the host's training package was at work, not just its import."""
    return any(
        frame.f_globals.get("__name__", "").startswith("megatron.training")
        and frame.f_code.co_name != "<module>"
        for frame, _ in traceback.walk_tb(trace)
    )


def _parse_alone() -> None:
    from megatron.training import arguments, global_vars

    args = arguments.parse_args(ignore_unknown_args=True)
    if args.use_checkpoint_args:
        from megatron.training.checkpointing import load_args_from_checkpoint

        load_args_from_checkpoint(args)
    arguments.validate_args(args)
    with contextlib.suppress(_ArgumentsAreRead):
        global_vars.set_global_variables(args)


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


@contextlib.contextmanager
def _stopped_behind_arguments(parsing: _Parsing) -> Iterator[None]:
    """The host's own start, up to the count of micro-batches, with our flags in its parser."""
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, global_vars

    add_stock_arguments = arguments.add_megatron_arguments
    count_microbatches = global_vars.init_num_microbatches_calculator

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_stock_arguments(parser)
        _watch(parser, parsing)
        return parser

    def init_num_microbatches_calculator(*args: Any, **kwargs: Any) -> None:
        count_microbatches(*args, **kwargs)
        raise _ArgumentsAreRead

    counter = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (arguments, "add_megatron_arguments", add_megatron_arguments),
            (global_vars, count_microbatches.__name__, init_num_microbatches_calculator),
            (global_vars, "_GLOBAL_ARGS", None),
            (num_microbatches_calculator, counter, None),
        ):
            stack.enter_context(_replaced(module, name, value))
        yield


def _watch(parser: argparse.ArgumentParser, parsing: _Parsing) -> None:
    """Have the parser take our flags, if the script has not added them, and tell of the others."""
    parse_stock, stock = parser.parse_known_args, set(parser._option_string_actions)

    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        options = parser._option_string_actions
        parsing.of_the_script = {
            name for name in options.keys() - stock if MECHANISM_FLAG.lstrip("-") not in name
        }
        if MECHANISM_FLAG not in options:
            add_residual_arguments(parser)
        parsed, others = parse_stock(*args, **kwargs)
        parsing.unknown = tuple(word for word in others if word.startswith("--"))
        return parsed, others

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def _as_rank_zero(script: Path, argv: Sequence[str], gpus: int) -> Iterator[None]:
    """The command line and the environment of the first process of a launch."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}
    if not any("fsdp" in word for word in argv):  # whose launches leave it unset
        environment[CONNECTIONS] = os.environ.get(CONNECTIONS, "1")
    before, words = {name: os.environ.get(name) for name in environment}, sys.argv
    os.environ.update(environment)
    sys.argv = [str(script), *argv]
    try:
        yield
    finally:
        sys.argv = words
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def with_transformer_engine() -> Iterator[list[str]]:
    """The host's checks find Transformer Engine; gives a note where it is not there."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils

    if utils.get_te_version() > Version("0"):
        yield []
        return
    with (
        _replaced(utils, "_te_version", Version(ASSUMED_TE)),
        _replaced(rope_utils, "fused_apply_rotary_pos_emb", object()),
    ):
        yield [f"Transformer Engine is not installed here; checked as with {ASSUMED_TE}"]


def _args() -> argparse.Namespace:
    from megatron.training import global_vars

    args: argparse.Namespace | None = global_vars._GLOBAL_ARGS
    assert args is not None, "the host has parsed them"
    return args


def _config() -> Any:
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(_args())


def _microbatches() -> tuple[tuple[int, ...], list[str]]:
    """Micro-batches of a step, as the batch grows, and what the host has against some of them."""
    from megatron.core import num_microbatches_calculator

    counter: Any = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    counts, notes = [], []
    for samples in _batch_changes(counter):
        counter.update(samples, consistency_check=False)
        counts.append(counter.get())
        try:
            counter.update(samples, consistency_check=True)
        except AssertionError as error:
            if not samples and _args().load is None:  # otherwise it may be past them by now
                raise
            notes.append(f"this launch ends after {samples} samples: {_words(error)}")
    if getattr(_args(), "rampup_batch_size", None) and not hasattr(counter, RAMP):
        notes.append("this Megatron ignores --rampup-batch-size; use --step-batch-size-schedule")
    return tuple(counts), notes


def _batch_changes(counter: Any) -> list[int]:
    """Samples consumed whenever the host takes another batch size, from 0 on."""
    if hasattr(counter, "schedule"):  # by steps, from 0.18 on
        return [samples for samples, _ in counter.schedule]
    if not getattr(counter, RAMP, None):
        return [0]
    each = getattr(counter, RAMP)  # by equal increments, to 0.17
    steps = round(counter.ramup_samples / each)
    return [0, *(int(each * step) + 1 for step in range(1, steps + 1))]
