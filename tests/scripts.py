# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Python scripts as ranks without starting Python: on forks of a process that stays clean.

A script that trains with Megatron imports for ten seconds and works for one. So when a session of
tests begins, one process is forked that has imported what is slow and never runs a test; each run
of a script is a fork of that one, as good as new. What the start itself does, torchrun's and the
runner's order of imports, is for tests that start processes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_residuals import cpu_host
from megatron_residuals.testing import RankFailure, run_ranks

_PR_SET_PDEATHSIG = 1
_SLOW = ("examples.pretrain_gpt", "megatron.core.tokenizers.text.libraries")
"""What a script that trains imports sooner or later."""


class Run(NamedTuple):
    """What a finished command left behind; `log` is what all ranks wrote to stdout and stderr."""

    status: int
    log: str


class Order(NamedTuple):
    """A command for Python, as a list of words behind `python`, and where and how to run it."""

    words: Sequence[str]
    folder: Path
    ranks: int = 1
    env: Mapping[str, str] = {}
    before: str = ""
    """Code that the ranks run first, as they would a `sitecustomize.py`."""
    training: bool = False
    """Import `megatron.training` once for all, and prepare it for the CPU."""
    timeout_s: float = 150.0


class Scripts:
    """The clean process, and the line to it."""

    def __init__(self) -> None:
        self._line, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            try:
                self._line.close()
                _serve(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

        self.cpu_s = 0.0
        """CPU seconds of the clean process and all its ranks."""

    def run(self, order: Order) -> Run:
        """Runs a command on its ranks; status 1, and tracebacks in `log`, if one of them fails."""
        self._line.send(order)
        run, self.cpu_s = self._line.recv()
        return run


def cpu_s() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in (own, children))


def _serve(line: Connection) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        try:
            order: Order = line.recv()
        except EOFError:
            return
        line.send((_run(order), cpu_s()))


def _run(order: Order) -> Run:
    if order.training:
        cpu_host.install(training=True)
        for name in _SLOW:
            importlib.import_module(name)
    log = order.folder / f"log{len(list(order.folder.glob('log*')))}"
    log.touch()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**_variables_of_torchrun(store.port), **order.env}
    try:
        run_ranks(
            order.ranks, _be_python, order, log, timeout_s=order.timeout_s, env=env, group=False
        )
    except RankFailure as failure:
        return Run(1, f"{log.read_text(errors='replace')}\n{failure}")
    return Run(0, log.read_text(errors="replace"))


def _variables_of_torchrun(port: int) -> dict[str, str]:
    """What its agent, who keeps the store, tells the ranks besides those of `run_ranks`."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _be_python(order: Order, log: Path) -> None:
    """Go on as `python WORDS` would in a fresh process of this rank."""
    os.chdir(order.folder)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(out, number)
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, closefd=False))
    logging.root.handlers.clear()  # pytest's
    warnings.resetwarnings()
    exec(order.before, {})
    first, *rest = order.words
    try:
        if first == "-m":
            sys.argv = rest
            sys.path.insert(0, str(order.folder))
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
