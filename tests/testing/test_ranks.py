# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks as forks: results by rank, and failures that say who and where."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_residuals.testing import RankFailure, run_ranks
from megatron_residuals.testing.patience import patience

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `run_ranks` puts its folder, so that a test sees what is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _rank() -> int:
    return torch.distributed.get_rank()


def test_results_come_back_in_the_order_of_the_ranks(temporary_folder: Path) -> None:
    offset = 10

    def total() -> tuple[int, torch.Tensor]:
        mine = torch.tensor([float(_rank() + offset)])
        torch.distributed.all_reduce(mine)
        return _rank(), mine

    results = run_ranks(3, total)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert [value.item() for _, value in results] == [33.0, 33.0, 33.0]
    assert not list(temporary_folder.iterdir())


def test_one_rank_is_forked_too_and_leaves_the_parent_as_it_was() -> None:
    seen: list[int] = []

    def remember() -> tuple[int, int, str, str]:
        seen.append(1)
        return os.getpid(), torch.get_num_threads(), os.environ["WORLD_SIZE"], os.environ["EXTRA"]

    ((pid, num_threads, world_size, extra),) = run_ranks(1, remember, env={"EXTRA": "yes"})
    assert pid != os.getpid()
    assert (num_threads, world_size, extra) == (1, "1", "yes")
    assert not seen and "EXTRA" not in os.environ and not torch.distributed.is_initialized()


def test_a_rank_that_fails_is_named_with_its_traceback_before_those_it_brought_down() -> None:
    def fail_on_one() -> None:
        if _rank() == 1:
            raise ValueError("the weights are upside down")
        torch.distributed.barrier()

    with pytest.raises(RankFailure) as failure:
        run_ranks(3, fail_on_one)
    message = str(failure.value)
    assert message.startswith("ranks [1, ")
    first, *others = message.split("--- rank ")[1:]
    assert first.startswith("1\n")
    assert "ValueError: the weights are upside down" in first and "in fail_on_one" in first
    assert len(others) == 2 and all("Connection" in other for other in others)


def test_a_time_out_names_the_rank_that_hung_and_where_and_kills_it(temporary_folder: Path) -> None:
    def wait_for_a_message_that_nobody_sends() -> None:
        pids[_rank()] = os.getpid()
        if _rank() == 1:
            torch.distributed.recv(torch.empty(1), src=0)

    pids = torch.zeros(2, dtype=torch.int64).share_memory_()
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, wait_for_a_message_that_nobody_sends, timeout_s=1.5)
    assert time.monotonic() - started < 10 * patience()
    message = str(failure.value)
    assert "ranks [1] of 2 hung: still running after 1.5 s" in message
    assert "ranks [0] had finished and waited for the others" in message
    assert "--- rank 1 hung in" in message and "wait_for_a_message_that_nobody_sends" in message
    for pid in pids.tolist():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(temporary_folder.iterdir())


def test_a_rank_that_dies_of_a_signal_is_named_with_the_signal() -> None:
    def die() -> None:
        if _rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    with pytest.raises(RankFailure, match=r"rank 0\ndied without a traceback \(killed by SIGKILL"):
        run_ranks(2, die)


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankFailure, match="--- rank 0\n(.|\n)*pickle"):
        run_ranks(1, lambda: lambda: None)


def test_a_parent_that_has_run_a_backward_on_the_cpu_can_still_fork() -> None:
    def gradient() -> float:
        x = torch.linspace(-1, 1, 200 * 200).reshape(200, 200).requires_grad_()
        checkpoint(lambda y: torch.tanh(y @ y) @ y, x, use_reentrant=True).sum().backward()
        return x.grad.sum().item()

    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradient()
        first, second = run_ranks(2, gradient, timeout_s=20)
    finally:
        torch.set_num_threads(num_threads)
    assert first == second


# A rank that is to be a script once left the group made for it to make its own, and closed the
# connections of a rank that was still connecting.
def test_ranks_can_be_left_without_a_group() -> None:
    assert run_ranks(2, torch.distributed.is_initialized, group=False) == [False, False]
    assert run_ranks(2, torch.distributed.is_initialized) == [True, True]


def test_a_parent_with_cuda_initialised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is initialised.*CUDA_VISIBLE_DEVICES"):
        run_ranks(1, _rank)
