# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The scripts behind `make`: finding Pythons, counting results, and what CI calls."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "cat", "cmp", "dirname", "head", "rm")


def bare_environment(folder: Path) -> dict[str, str]:
    """A PATH with nothing on it but the tools that the script calls, and a home of its own."""
    tools = folder / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    return {"PATH": str(tools), "HOME": str(folder)}


def run_setup(folder: Path, env: dict[str, str], *args: str) -> tuple[int, list[str]]:
    """Exit status and lines of a copy of .ci/setup that looks on PATH and in pyenv's folder."""
    script = folder / ".ci" / "setup"
    script.parent.mkdir()
    text, count = re.subn(
        r"^places=.*$",
        "places=",
        (ROOT / ".ci" / "setup").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert count == 1
    script.write_text(text)
    run = subprocess.run(
        [shutil.which("bash") or "bash", str(script), *args],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return run.returncode, (run.stdout + run.stderr).splitlines()


def write_script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_setup_says_in_one_line_what_to_do_where_no_python_is_new_enough(tmp_path: Path) -> None:
    env = bare_environment(tmp_path)
    write_script(tmp_path / "tools" / "python3", "echo Python 3.9.1; exit 1")
    code, printed = run_setup(tmp_path, env, "main")
    (line,) = printed
    assert code != 0
    assert "no Python 3.12 or newer" in line and "pyenv install 3.12" in line


def test_setup_refuses_in_one_line_the_named_python_when_it_is_too_old(tmp_path: Path) -> None:
    named = write_script(tmp_path / "named", "echo Python 3.9.1; exit 1")
    env = {**bare_environment(tmp_path), "PYTHON": str(named)}
    code, printed = run_setup(tmp_path, env, "main")
    (line,) = printed
    assert code != 0
    assert f"PYTHON={named}" in line and "3.12 or newer" in line


def test_setup_finds_the_python_that_pyenv_has_but_path_has_not(tmp_path: Path) -> None:
    folder = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin"
    folder.mkdir(parents=True)
    # It passes for a 3.12, and ends the script at the next step: it cannot make an environment.
    pretend = f'[ "$1" = -m ] && exit 9\ncat >/dev/null\necho {folder}/python3.12'
    write_script(folder / "python3.12", pretend)
    code, printed = run_setup(tmp_path, bare_environment(tmp_path), "main")
    assert code == 9
    assert f"from {folder}/python3.12" in printed[-1]


def test_the_oldest_host_is_reported_as_not_run_where_its_python_is_missing(tmp_path: Path) -> None:
    code, printed = run_setup(tmp_path, bare_environment(tmp_path), "hosts", "0.16.1")
    (line,) = printed
    assert code == 0
    assert "host 0.16.1: not run (no Python 3.10/3.11 found; install one to test it)" in line


def test_ci_calls_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test\b", script.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module .ci/run_tests.py, with nothing of this pytest run left in its environment."""
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / ".ci" / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up.
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    return module


MIXED = """
import pytest
def test_a(): pass
def test_b(): pass
def test_c(): assert False
def test_d(nothing_by_this_name): pass
@pytest.mark.skip(reason="shows in the total")
def test_e(): pass
"""


@pytest.mark.parametrize(
    ("text", "result", "counts", "note"),
    [
        ("def test_a(): pass", "ok", (1, 0, 0), ""),
        (MIXED, "FAILED", (2, 2, 1), ""),
        ("", "FAILED", (0, 1, 0), "no tests found"),
        ("import nothing_by_this_name", "FAILED", (0, 1, 0), "interrupted"),
        ("import os; os._exit(7)", "FAILED", (0, 1, 0), "exit status 7"),
    ],
    ids=["all pass", "mixed", "no tests", "cannot be imported", "dies"],
)
def test_each_pytest_run_is_counted(
    runner: ModuleType,
    tmp_path: Path,
    text: str,
    result: str,
    counts: tuple[int, int, int],
    note: str,
) -> None:
    (tmp_path / "test_sample.py").write_text(text)
    args = [f"--rootdir={tmp_path}", str(tmp_path)]
    outcome = runner.run_pytest("sample", Path(sys.executable), args, runner.environment())
    assert (outcome.result, outcome.note) == (result, note)
    assert (outcome.passed, outcome.failed, outcome.skipped) == counts


def test_the_slowest_tests_of_all_runs_are_listed_by_the_cpu_time_that_each_noted(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "def test_{0}(record_property): record_property('cpu_s', '{1}')\n"
    (tmp_path / "test_sample.py").write_text(text.format("quick", 1.5) + text.format("slow", 40.25))
    args = [f"--rootdir={tmp_path}", str(tmp_path)]
    sample = runner.run_pytest("sample", Path(sys.executable), args, runner.environment())
    many = tuple(runner.Duration(f"test_{i}", 2.0, 2.0 + i) for i in range(runner.NUM_SLOWEST))
    runner.print_slowest([sample, runner.Outcome("other", "ok", durations=many)])
    lines = capsys.readouterr().out.split("slowest tests\n")[1].splitlines()
    assert len(lines) == runner.NUM_SLOWEST
    assert lines[0].split()[0] == "40.2" and lines[0].endswith("test_sample::test_slow  (sample)")
    assert lines[1].split()[0] == "21.0" and lines[1].endswith("test_19  (other)")
    assert not any("test_quick" in line for line in lines)


def test_the_last_line_is_the_plain_total_and_a_failure_fails_the_whole(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_pytest(name: str, *_: object) -> object:
        failed = int(name.endswith("0.18.2"))
        return runner.Outcome(name, "FAILED" if failed else "ok", 10, failed, 3)

    monkeypatch.setattr(runner, "run_pytest", run_pytest)
    monkeypatch.setattr(runner, "run_tool", lambda name, *_: runner.Outcome(name, "ok"))
    monkeypatch.setattr(runner, "OLDEST_PYTHON", Path("/nowhere/python"))
    monkeypatch.setattr(runner, "TRANSFORMER_ENGINE", Path("/nowhere/transformer-engine"))
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--hosts", "0.16.1", "0.18.2"])
    assert runner.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "20 passed, 1 failed, 6 skipped"
    engine = [line for line in printed if line.startswith("transformer engine")]
    assert len(engine) == 2 and all("not run" in line for line in engine)
    for name in ("megatron-core 0.16.1", "oldest versions"):
        (old,) = [line for line in printed if line.startswith(name)]
        assert "not run" in old and "no Python 3.10/3.11 found" in old


def test_the_reduced_run_with_the_oldest_versions_names_tests_that_exist(
    runner: ModuleType,
) -> None:
    assert runner.OLDEST_TESTS and all((ROOT / path).exists() for path in runner.OLDEST_TESTS)
