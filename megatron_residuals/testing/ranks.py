# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several gloo ranks, each a fork of this process.

Importing torch and Megatron-Core takes seconds, forking takes milliseconds: the parent imports once
and every test case forks. Forking copies only the calling thread. Hence the parent must not have
initialised CUDA (refused below), and once it has run a backward on an accelerator, torch itself
refuses a backward in the child. A backward on the CPU runs in the calling thread and does no harm,
nor do OpenMP's threads, because every child computes with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_residuals.testing.patience import Deadline

Result = TypeVar("Result")

_POLL_S = 0.005
_GRACE_S = 3.0
"""How long the other ranks may go on once one has failed: their own tracebacks help too."""
_DUMP_S = 1.0
_PR_SET_PDEATHSIG = 1


class RankFailure(RuntimeError):
    """One or more ranks raised, died or hung; the message carries what each of them had to say."""


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Result],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    group: bool = True,
) -> list[Result]:
    """Calls `fn(*args)` on `num_ranks` forked ranks of one gloo group; one rank is forked as well.

    Args:
        fn: any callable, closures included; what it returns must be picklable.
        timeout_s: seconds until every rank is asked where it is, then killed; on a machine that is
            busy with other things, as many times more as `patience` finds it slower.
        env: environment variables of the ranks, beside those that torchrun sets.
        group: False leaves the making of process groups to `fn`.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailure: with the traceback of each rank that raised, the earliest first, and the Python
            stack of each rank that hung.
        RuntimeError: CUDA is initialised in this process, so that no fork of it can work.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "run_ranks forks this process, and CUDA is initialised in it: a fork cannot use CUDA. "
            "Call it before anything touches the GPU, or hide the GPU with CUDA_VISIBLE_DEVICES=''."
        )
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    sys.stdout.flush()
    sys.stderr.flush()
    pids: list[int] = []
    try:
        for rank in range(num_ranks):
            with warnings.catch_warnings():
                # Python 3.12 warns of forking with threads alive: see the module's docstring.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _run_child(folder, rank, num_ranks, fn, args, env or {}, group)
            pids.append(pid)
            _own_group(pid)
        exits = _wait(folder, pids, timeout_s)
        if any(exits.values()) or len(exits) < num_ranks:
            raise RankFailure(_describe(folder, pids, exits, timeout_s))
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(num_ranks)]
    finally:
        _kill(pids)
        shutil.rmtree(folder, ignore_errors=True)


def _run_child(
    folder: Path,
    rank: int,
    num_ranks: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    env: Mapping[str, str],
    group: bool,
) -> None:
    """Never returns: a fork must not run its parent's exit handlers, nor the rest of its tests."""
    status = 1
    try:
        _enter_child(folder, rank, num_ranks, env)
        if group:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
            )
        result = pickle.dumps(fn(*args))
        (folder / f"result{rank}").write_bytes(result)
        status = 0
        # A rank that leaves early closes the connections of one that is still receiving. When the
        # barrier fails, another rank has failed and says so itself.
        with contextlib.suppress(RuntimeError):
            _leave_groups()
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    finally:
        _exit_child(status)


def _enter_child(folder: Path, rank: int, num_ranks: int, env: Mapping[str, str]) -> None:
    _own_group(0)
    # What the parent has made stays alive in the parent: no collection here need look at it, which
    # takes half a second for what Megatron imports, and copies every page of it.
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.register(signal.SIGUSR1, file=(folder / f"stack{rank}").open("w"))
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    os.environ.update(env)
    torch.set_num_threads(1)


def _own_group(pid: int) -> None:
    """A rank is killed with its helper processes. Parent and child both ask: neither is first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _leave_groups() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _exit_child(status: int) -> None:
    try:
        # Ends the manager servers that the rank started; os._exit would orphan them.
        finalisers = sys.modules.get("multiprocessing.util")
        if finalisers is not None:
            finalisers._exit_function()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait(folder: Path, pids: list[int], timeout_s: float) -> dict[int, int]:
    """Exit code by rank; ranks still running at the end of their time are left out."""
    deadline = Deadline(timeout_s)
    exits: dict[int, int] = {}
    failed = False
    while len(exits) < len(pids) and not deadline.is_over():
        for rank, pid in enumerate(pids):
            if rank not in exits:
                exited, status = os.waitpid(pid, os.WNOHANG)
                if exited:
                    exits[rank] = os.waitstatus_to_exitcode(status)
        if not failed and any(exits.values()):
            failed = True
            deadline = Deadline(_GRACE_S)
        time.sleep(_POLL_S)
    return exits


def _describe(folder: Path, pids: list[int], exits: dict[int, int], timeout_s: float) -> str:
    running = [rank for rank in range(len(pids)) if rank not in exits]
    waiting = [rank for rank in running if (folder / f"result{rank}").exists()]
    hung = [rank for rank in running if rank not in waiting]
    failed = [rank for rank in exits if exits[rank] != 0]
    # Secondary failures ("Connection closed by peer") come after the one that matters.
    failed.sort(key=lambda rank: _written_at(folder / f"error{rank}"))
    head = []
    sections = []
    if failed:
        head.append(f"ranks {failed} of {len(pids)} failed (earliest first)")
        sections += [_failed_section(folder, rank, exits[rank]) for rank in failed]
    if hung:
        reason = f"{_GRACE_S:g} s after the failure" if failed else f"after {timeout_s:g} s"
        head.append(f"ranks {hung} of {len(pids)} hung: still running {reason}")
        stacks = _dump_stacks(folder, {rank: pids[rank] for rank in hung})
        sections += [f"--- rank {rank} hung in\n{stacks[rank]}" for rank in hung]
    if waiting:
        head.append(f"ranks {waiting} had finished and waited for the others")
    return "; ".join(head) + "\n" + "\n".join(sections)


def _failed_section(folder: Path, rank: int, exit_code: int) -> str:
    path = folder / f"error{rank}"
    if path.exists():
        return f"--- rank {rank}\n{path.read_text()}"
    how = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit {exit_code}"
    return f"--- rank {rank}\ndied without a traceback ({how})\n"


def _written_at(path: Path) -> float:
    # A rank without a traceback died of a signal: nobody else's failure can have caused that.
    return path.stat().st_mtime if path.exists() else 0.0


def _dump_stacks(folder: Path, pids: dict[int, int]) -> dict[int, str]:
    """The stack of each live rank, written by its faulthandler: needs no cooperation and no GIL."""
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    paths = {rank: folder / f"stack{rank}" for rank in pids}
    deadline = Deadline(_DUMP_S)
    while not (deadline.is_over() or all(_is_written(path) for path in paths.values())):
        time.sleep(_POLL_S)
    # The dump is one short burst of writes: let the last one finish.
    time.sleep(10 * _POLL_S)
    return {
        rank: path.read_text() if _is_written(path) else "(it gave no stack)\n"
        for rank, path in paths.items()
    }


def _is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
