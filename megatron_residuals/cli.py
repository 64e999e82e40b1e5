# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The `megatron-residuals` console command.

Every subcommand is a module of `commands` whose `register` adds its parser and names its handler.
A handler imports torch or Megatron itself if it needs them, so that the others start without.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from megatron_residuals._version import __version__
from megatron_residuals.commands import (
    check,
    convert,
    doctor,
    export,
    memory,
    plan,
    report,
    simulate,
)
from megatron_residuals.text import reason

PROGRAM = "megatron-residuals"
COMMANDS = (plan, memory, simulate, convert, export, report, check, doctor)

EXAMPLES = """\
examples:
  megatron-residuals plan --layers 96 --block-layers 12 --pp 8 --vpp 4
  megatron-residuals plan --help
  megatron-residuals doctor
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; a parsed namespace carries its `handler`."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Tools around residual connections of Megatron-Core models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    2 is for input that cannot be used and for files that cannot be read or written: a handler lets
    ValueError and OSError through, and the message is one line that says what is wrong with which.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    own, launch = words, None
    if "--" in words:
        own, launch = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = build_parser()
    try:
        args = parser.parse_args(own)
        if launch is not None and not hasattr(args, "described_by_launch"):
            parser.error("this command takes nothing behind --")
    except SystemExit as exit_:  # argparse has printed help or its own error
        return exit_.code if isinstance(exit_.code, int) else 2
    args.launch = launch
    handler: Callable[[argparse.Namespace], int] = args.handler
    try:
        status = handler(args)
        sys.stdout.flush()
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        _abandon_stdout()
        return 1
    except OSError as error:
        print(f"{PROGRAM}: error: {reason(error)}", file=sys.stderr)
        if error.filename is None:  # of stdout itself, as on a disk that is full
            _abandon_stdout()
        return 2
    return status


def _abandon_stdout() -> None:
    """Python flushes stdout once more at exit; give it somewhere to go."""
    with contextlib.suppress(OSError):  # a stream without a file behind it needs nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
