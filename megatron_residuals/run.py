# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_residuals.run [--cpu-host] SCRIPT ARGS…``: run a Megatron script as it is.

Adds the ``--residual…`` flags to Megatron's own parser, replaces the named seams, and runs the
script. Without ``--residual`` the script runs exactly as without us. With ``--rehearse`` it runs
one training step of it on fake tensors.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_residuals.commands.rehearse import add_rehearsal_options, rehearse, with_world
from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import (
    FROM_FLAGS,
    SPECS,
    add_residual_arguments,
    refuse_misspelt,
    refuse_other_models,
    residual_of,
)
from megatron_residuals.text import one_line

EXAMPLE = """\
example:
  torchrun … -m megatron_residuals.run pretrain_gpt.py … --residual block_attnres

among ARGS may be, besides those of the script:

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script; returns the exit status of its set-up (0, or 2 for bad arguments)."""
    try:
        options, script_argv = _split(list(sys.argv[1:] if argv is None else argv))
        residual = residual_of(script_argv)
        refuse_misspelt(script_argv)
        if residual is not None:
            refuse_other_models(options.script)
    except ValueError as error:
        print(f"megatron_residuals.run: error: {one_line(error)}", file=sys.stderr)
        return 2
    current_folder = sys.path[0]  # put there by `python -m`; a script has its own folder instead,
    # and finds the Megatron beside it: so must we, who import Megatron first
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    if options.rehearse is not None:
        return _rehearse(options, script_argv, residual)
    if options.cpu_host:
        from megatron_residuals.cpu_host import install as install_cpu_host

        host_report = install_cpu_host(training=True)
        if _is_first_rank():
            print(host_report, flush=True)
    if residual is not None:
        _prepare(script_argv)
    sys.argv = [options.script, *script_argv]
    sys.path.remove(current_folder)
    runpy.run_path(options.script, run_name="__main__")
    return 0


def _rehearse(
    options: argparse.Namespace, script_argv: list[str], residual: ResidualConfig | None
) -> int:
    from megatron_residuals.cpu_host import install as install_cpu_host
    from megatron_residuals.mcore.training.reading import Printed, quiet

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU would be left alone, and is not needed
    try:
        with quiet(Printed()):
            install_cpu_host(training=True)
            import megatron_residuals.mcore.rehearsal.launch  # noqa: F401
    except RuntimeError as error:
        print(f"megatron_residuals.run: error: {one_line(error)}", file=sys.stderr)
        return 2
    if residual is not None:
        _prepare(script_argv)
    return rehearse(options, script_argv, residual)


def _split(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_residuals.run",
        description="Run an unmodified Megatron script with --residual… flags.",
        epilog=EXAMPLE + _flags(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cpu-host",
        action="store_true",
        help="run Megatron on CPU with gloo; does nothing when a GPU is there",
    )
    add_rehearsal_options(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the Megatron script")
    parser.add_argument("script_argv", metavar="ARGS", nargs=argparse.REMAINDER)
    options, unknown = parser.parse_known_args(with_world(argv))
    if unknown:
        parser.error(
            f"{unknown[0]} stands where SCRIPT is expected; arguments of the script follow it"
        )
    if not Path(options.script).is_file():
        parser.error(f"{options.script} is not a file; give the path of a Megatron script")
    return options, options.script_argv


def _flags() -> str:
    """Our flags with their help: in some releases Megatron's own ``--help`` ends in an error."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    return add_residual_arguments(parser).format_help()


def _prepare(script_argv: list[str]) -> None:
    """Teach Megatron's parser our flags and see that the script's model takes our spec."""
    from megatron_residuals.mcore.install import SCRIPT, install

    install(SCRIPT)
    if "--spec" not in script_argv:
        script_argv.extend(("--spec", SPECS, FROM_FLAGS))


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
