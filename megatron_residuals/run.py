# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_residuals.run [--cpu-host] SCRIPT ARGS…``: run a Megatron script as it is.

Adds the ``--residual…`` flags to Megatron's own parser, replaces the named seams, and runs the
script. Without ``--residual`` the script runs exactly as without us.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECS, FROM_FLAGS = "megatron_residuals.specs", "from_flags"
EXAMPLE = """\
example:
  torchrun … -m megatron_residuals.run pretrain_gpt.py … --residual block_attnres

among ARGS may be, besides those of the script:

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script; returns the exit status of its set-up (0, or 2 for bad arguments)."""
    options, script_argv = _split(list(sys.argv[1:] if argv is None else argv))
    current_folder = sys.path[0]  # put there by `python -m`; a script has its own folder instead,
    # and finds the Megatron beside it: so must we, who import Megatron first
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    if options.cpu_host:
        from megatron_residuals.testing.cpu_host import install as install_cpu_host

        host_report = install_cpu_host(training=True)
        if _is_first_rank():
            print(host_report, flush=True)
    try:
        residual = _read_residual(script_argv)
    except ValueError as error:
        print(f"megatron_residuals.run: error: {error}", file=sys.stderr)
        return 2
    if residual is not None:
        _prepare(script_argv)
    sys.argv = [options.script, *script_argv]
    sys.path.remove(current_folder)
    runpy.run_path(options.script, run_name="__main__")
    return 0


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
    parser.add_argument("script", metavar="SCRIPT", help="the Megatron script")
    parser.add_argument("script_argv", metavar="ARGS", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        parser.error(f"{options.script} is not a file; give the path of a Megatron script")
    return options, options.script_argv


def _flags() -> str:
    """Our flags with their help: in some releases Megatron's own ``--help`` ends in an error."""
    from megatron_residuals.mcore.arguments import add_residual_arguments

    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    return add_residual_arguments(parser).format_help()


def _read_residual(script_argv: Sequence[str]) -> Any:
    """The configuration in a script's arguments, or None where they ask for no residual."""
    from megatron_residuals.mcore.arguments import (
        MECHANISM_FLAG,
        add_residual_arguments,
        config_from_args,
    )

    if SPECS not in script_argv and not any(w.startswith(MECHANISM_FLAG) for w in script_argv):
        return None
    parser = add_residual_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    parser.add_argument("--spec", nargs="*")
    known, _ = parser.parse_known_args(script_argv)
    if known.spec is None:
        return config_from_args(known)
    if known.spec[:1] != [SPECS]:
        raise ValueError(
            f"--spec {' '.join(known.spec)} builds its own layers, on which {MECHANISM_FLAG} has "
            f"no effect; leave --spec out, or wrap that spec with {SPECS}.residual_spec"
        )
    if len(known.spec) != 2:
        raise ValueError(f"--spec {SPECS} takes one name behind it; give a mechanism's")
    mechanism = known.spec[1]
    return config_from_args(known, None if mechanism == FROM_FLAGS else mechanism)


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
