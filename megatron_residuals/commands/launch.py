# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A launch in place of options: ``megatron-residuals memory --gpus 64 -- SCRIPT ARGS…``.

What stands behind ``--`` is read by the installed Megatron itself. In front of the script may be
what starts it: torchrun with its options, or ``-m megatron_residuals.run``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_residuals.flags import (
    FROM_FLAGS,
    SPECS,
    other_model,
    refuse_misspelt,
    refuse_other_models,
    residual_of,
)

if TYPE_CHECKING:
    from megatron_residuals.mcore.training.forecast import Forecast

RUNNER, CPU_HOST = "megatron_residuals.run", "--cpu-host"
NO_HOST = """\
a launch is read by the Megatron that will run it, and here there is none ({}). Install \
megatron-core of at least 0.17, or put a Megatron-LM checkout on PYTHONPATH; or describe the model \
with the options of --help, which need neither"""


class Command(NamedTuple):
    """What starts a training run.

    Attributes:
        gpus: ranks of all nodes together, if torchrun's options are there and say so.
        for_gpus: whether it would not run on CPUs.
    """

    script: Path
    argv: tuple[str, ...]
    gpus: int | None
    for_gpus: bool

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """Split a command in front of the script and behind it.

        Raises:
            ValueError: there is no Python script in it.
        """
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if at is None and RUNNER in words:
            behind = words.index(RUNNER) + 1
            at = behind + (words[behind : behind + 1] == [CPU_HOST])
        if at is None or at >= len(words):
            raise ValueError(
                f"there is no Python script in: {' '.join(words) or '(nothing)'}; give its path, "
                "as in -- pretrain_gpt.py --num-layers 32 ..."
            )
        front, argv = words[:at], tuple(words[at + 1 :])
        over_gloo = ("--distributed-backend", "gloo") in zip(argv, argv[1:], strict=False)
        for_gpus = CPU_HOST not in front and not over_gloo
        return cls(Path(words[at]), argv, _gpus_of_torchrun(front), for_gpus)


def _gpus_of_torchrun(words: Sequence[str]) -> int | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="")
    parser.add_argument("--nnodes", default="1")
    with contextlib.suppress(SystemExit):  # an option without its value
        known, _ = parser.parse_known_args(list(words))
        if known.nproc_per_node.isdecimal() and known.nnodes.isdecimal():
            return int(known.nproc_per_node) * int(known.nnodes)
    return None


def add_launch_options(parser: argparse.ArgumentParser, *, beside: Container[str]) -> None:
    """To be called last: what a launch takes besides, and that the others describe it themselves.

    Args:
        beside: the options, by the names of their arguments, that go with a launch.
    """
    others = {
        action.dest: (action.option_strings[0], parser.get_default(action.dest))
        for action in reversed(parser._actions)
        if action.dest not in beside and action.default is not argparse.SUPPRESS
    }
    group = parser.add_argument_group(
        "launch", "in place of the options that describe a model: -- [torchrun ...] SCRIPT ARGS"
    )
    group.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="that the launch gets, of all nodes together (default: what torchrun's options say)",
    )
    parser.set_defaults(reads_launch=True, described_by_launch=others)


def forecast_of(args: argparse.Namespace) -> Forecast | None:
    """What the launch behind ``--`` means; None where there is none.

    Raises:
        ValueError: the launch cannot work, or options stand beside it that it answers itself.
    """
    if args.launch is None:
        if args.gpus is not None:
            raise ValueError("--gpus is of a launch; give one behind --, or leave it out")
        return None
    described = args.described_by_launch.items()
    given = [flag for name, (flag, default) in described if getattr(args, name) != default]
    if given:
        raise ValueError(
            f"{', '.join(given)}: not beside a launch, whose own arguments describe the model"
        )
    return read_launch(args.launch, args.gpus, getattr(args, "host_layer_bytes", None))


def read_launch(
    words: Sequence[str], gpus: int | None = None, host_layer_bytes: int | None = None
) -> Forecast:
    """Let the installed Megatron read a command, and put it into the planner's terms.

    Our own flags are looked at first, before anything heavy is imported.

    Args:
        gpus: of all nodes together; None: as torchrun's options say.
        host_layer_bytes: kept by one layer's attention and MLP, if that is known.

    Raises:
        ValueError: in Megatron's words or ours, why the launch cannot work or be predicted.
    """
    command = Command.parse(words)
    gpus = command.gpus if gpus is None else gpus
    if gpus is None or gpus < 1:
        raise ValueError(f"--gpus is {gpus}; give the number of GPUs of all nodes together")
    argv = list(command.argv)
    residual = residual_of(argv)
    refuse_misspelt(argv)
    if residual is not None:
        refuse_other_models(command.script)
        if "--spec" not in argv:  # as the runner does
            argv += ["--spec", SPECS, FROM_FLAGS]
    elif (other := other_model(command.script)) is not None:
        raise ValueError(f"{command.script.name} trains {other}; only GPTs are predicted")
    with _host(command.script):
        from megatron_residuals.mcore.training import forecast, reading

        for_gpus = command.for_gpus
        read = reading.read_launch(command.script, argv, gpus, for_gpus=for_gpus)
        return forecast.forecast(
            read, residual, for_gpus=for_gpus, host_layer_bytes=host_layer_bytes
        )


@contextlib.contextmanager
def _host(script: Path) -> Iterator[None]:
    """Megatron can be imported, the one beside the script first, and does without a GPU."""
    folder = str(script.resolve().parent)
    sys.path.insert(0, folder)
    try:
        _install_host()
        yield
    finally:
        sys.path.remove(folder)


def _install_host() -> None:
    try:
        from megatron_residuals.mcore.training.reading import CONNECTIONS, Printed, quiet

        is_users = CONNECTIONS in os.environ
        with quiet(Printed()):
            from megatron_residuals import cpu_host

            cpu_host.install(training=True)
            import megatron.training.training  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise ValueError(NO_HOST.format(error)) from error
    if not is_users:  # the CPU host's training wants it; whether the launch does, it must say
        os.environ.pop(CONNECTIONS, None)


def launch_fields(forecast: Forecast | None) -> dict[str, object]:
    """For JSON: the launch, and what is to be said of the prediction."""
    if forecast is None:
        return {}
    return {"launch": forecast.heading, "notes": list(forecast.remarks)}


def with_remarks(text: str, forecast: Forecast | None) -> str:
    """What a command prints, between the launch and what is to be said of it."""
    if forecast is None:
        return text
    remarks = [f"note: {remark}" for remark in forecast.remarks]
    return "\n".join([forecast.heading, "", text, *([""] if remarks else []), *remarks])
