# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The console command: what it does when a handler fails, and when its output cannot be written."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_residuals.cli import main
from megatron_residuals.commands import plan

PLAN = ["plan", "--layers", "4", "--streams", "2"]


def failing(error: Exception) -> Callable[..., int]:
    def handler(args: object) -> int:
        raise error

    return handler


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("FILE holds nothing"), "FILE holds nothing"),
        (OSError(errno.EACCES, "Permission denied", "FILE"), "FILE: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "FILE"), "FILE: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_ends_in_one_line_and_status_two(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # an error of the system's ended every command in a traceback
    monkeypatch.setattr(plan, "run_plan", failing(error))
    assert main(PLAN) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"megatron-residuals: error: {words}\n"


SIZES = "--layers 4 --hidden-size 32 --seq-length 16 --micro-batch-size 1"


def test_an_output_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "output"
    words = [*f"simulate {SIZES}".split(), "--trace", str(target)]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"megatron-residuals: error: {target}: Not a directory\n"


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "run_plan", failing(RuntimeError("a fault of the program")))
    with pytest.raises(RuntimeError):
        main(PLAN)


def test_output_that_finds_no_room_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(PLAN) == 2
    assert (
        capsys.readouterr().err == "megatron-residuals: error: [Errno 28] No space left on device\n"
    )
