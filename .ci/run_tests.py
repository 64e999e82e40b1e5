# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run the linter and every test that needs no GPU, on each host, and add up the results.

Called by `make test` with the Python of `.venv`, after `.ci/setup` made the environments:

    .venv/bin/python .ci/run_tests.py --hosts 0.16.1 0.17.1 0.18.2 [--workers 2] [-- PYTEST ARGS]

Printed at the end: the slowest tests of all runs, a table of the runs, the CPU time of all tests,
and as the last line the plain total; the exit status is 0 when nothing failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

NUM_SLOWEST = 20
ROOT = Path(__file__).resolve().parent.parent
OLDEST_HOST, OLDEST_PYTHON = "0.16.", ROOT / ".venv-oldest" / "bin" / "python"
NO_OLD_PYTHON = "no Python 3.10/3.11 found"
# What meets torch and the optional libraries otherwise than through Megatron-Core.
OLDEST_TESTS = [
    "tests/interchange",
    "tests/diagnostics",
    "tests/kernels/test_agreement.py",
]
HOSTS = ROOT / ".venv" / "hosts"
TRANSFORMER_ENGINE = HOSTS / "transformer-engine"
TRANSFORMER_ENGINE_TESTS = "tests/transformer_engine"
# What one runs while working: arithmetic, mathematics, states, and each mechanism once through the
# host's interleaved schedule.
FAST_TESTS = [
    "tests/test_architecture.py",
    "tests/test_config.py",
    "tests/test_settings.py",
    "tests/test_depth.py",
    "tests/mechanisms",
    "tests/functional",
    "tests/pipeline",
    "tests/transport",
    "tests/modules/test_initial_equality.py",
    "tests/modules/test_states_are_values.py",
    "tests/mcore/test_equality.py",
    "--deselect=tests/mcore/test_equality.py::test_tensor_parallelism_equals_one_process",
    "--deselect=tests/mcore/test_equality.py::test_at_initialisation_a_mechanism_is_the_stock_model",
]
PYTEST_EXIT_CODES = {
    2: "interrupted",
    3: "internal error",
    4: "usage error",
    5: "no tests found",
}


@dataclass(frozen=True)
class Duration:
    """What one test took; CPU seconds, its ranks included, are noted by `tests/conftest.py`."""

    test: str
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Outcome:
    """What one run gave; `note` says why when it did not run or stopped early."""

    name: str
    result: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""
    durations: tuple[Duration, ...] = ()


def environment(**changes: str) -> dict[str, str]:
    """The caller's environment without what would leak into a test, one thread per process."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def announce(name: str) -> None:
    print(f"\n===== {name} =====", flush=True)


def run_tool(name: str, *commands: str) -> Outcome:
    """A tool that reads the sources, each of its commands whatever the others find."""
    announce(name)
    began = time.monotonic()
    tool = [sys.executable, "-m", name]
    codes = [subprocess.run([*tool, *command.split()], cwd=ROOT).returncode for command in commands]
    result = "FAILED" if any(codes) else "ok"
    return Outcome(name, result, seconds=time.monotonic() - began)


def read_counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed (errors included) and skipped, from pytest's JUnit report."""
    passed = failed = skipped = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        tests, skips = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        faults = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        passed, failed, skipped = passed + tests - faults - skips, failed + faults, skipped + skips
    return passed, failed, skipped


def read_durations(report: Path) -> tuple[Duration, ...]:
    """What each test took, from pytest's JUnit report."""
    return tuple(
        Duration(
            f"{case.get('classname')}::{case.get('name')}",
            float(case.get("time", 0)),
            sum(
                float(p.get("value", 0)) for p in case.iter("property") if p.get("name") == "cpu_s"
            ),
        )
        for case in ElementTree.parse(report).getroot().iter("testcase")
    )


def run_pytest(name: str, python: Path, args: Sequence[str], env: Mapping[str, str]) -> Outcome:
    """One pytest run; one that stops without naming a failed test counts as one failure."""
    announce(name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", f"--junitxml={report}", *args]
        code = subprocess.run(command, cwd=ROOT, env=dict(env)).returncode
        passed, failed, skipped = read_counts(report) if report.is_file() else (0, 0, 0)
        durations = read_durations(report) if report.is_file() else ()
    note = PYTEST_EXIT_CODES.get(code, "" if code in (0, 1) else f"exit status {code}")
    if code and not failed:
        failed, note = 1, note or "failed without a failed test"
    result = "FAILED" if code else "ok"
    seconds = time.monotonic() - began
    return Outcome(name, result, passed, failed, skipped, seconds, note, durations)


def run_host(release: str, args: Sequence[str]) -> Outcome:
    """The host tests on another Megatron-Core release; products of cases are the newest's."""
    name = f"megatron-core {release}"
    env = environment(MEGATRON_RESIDUALS_EXPECTED_HOST=release)
    python = Path(sys.executable)
    if release.startswith(OLDEST_HOST):
        python = OLDEST_PYTHON
        if not python.exists():
            return Outcome(name, "not run", note=NO_OLD_PYTHON)
    else:
        env["PYTHONPATH"] = str(HOSTS / f"mcore-{release}")
    chosen = ["-m", "host and not newest", "--each-value-once", "tests/mcore"]
    return run_pytest(name, python, [*chosen, *args], env)


def run_transformer_engine(release: str | None, args: Sequence[str]) -> Outcome:
    """The tests of Transformer Engine's own classes, in a process that can import them.

    On another release of the host (None: the newest) those of its specs alone.
    """
    name = f"transformer engine, {release or 'newest'}"
    if not TRANSFORMER_ENGINE.exists():
        return Outcome(name, "not run", note="make dev installs its Python")
    folders = [TRANSFORMER_ENGINE, *([HOSTS / f"mcore-{release}"] if release else [])]
    env = environment(PYTHONPATH=os.pathsep.join(map(str, folders)))
    chosen = ["-m", "host and not newest"] if release else []
    command = [*chosen, TRANSFORMER_ENGINE_TESTS, "-n", "0", *args]
    return run_pytest(name, Path(sys.executable), command, env)


def run_oldest(args: Sequence[str]) -> Outcome:
    """A reduced run with the oldest supported version of everything."""
    name = "oldest versions"
    if not OLDEST_PYTHON.exists():
        return Outcome(name, "not run", note=NO_OLD_PYTHON)
    return run_pytest(name, OLDEST_PYTHON, [*OLDEST_TESTS, *args], environment())


def print_slowest(outcomes: Sequence[Outcome]) -> None:
    """The slowest tests of all runs, by CPU time: the clock also shows who else was at work."""
    tests = [(duration, o.name) for o in outcomes for duration in o.durations]
    tests.sort(key=lambda test: test[0].cpu_s, reverse=True)
    print(f"\n{'CPU':>9}{'clock':>9}  slowest tests")
    for duration, name in tests[:NUM_SLOWEST]:
        print(f"{duration.cpu_s:>7.1f} s{duration.seconds:>7.1f} s  {duration.test}  ({name})")


def print_table(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'run':<24}{'result':<9}{'passed':>8}{'failed':>8}{'skipped':>9}{'time':>8}")
    for o in outcomes:
        counts = f"{o.passed:>8}{o.failed:>8}{o.skipped:>9}"
        if o.name == "ruff" or o.result == "not run":
            counts = f"{'-':>8}{'-':>8}{'-':>9}"
        print(f"{o.name:<24}{o.result:<9}{counts}{o.seconds:>6.0f} s  {o.note}".rstrip())


def main() -> int:
    """Run everything, whatever fails on the way; 0 when nothing did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", nargs="*", default=[], help="releases beside the one in .venv")
    parser.add_argument("--workers", default="2", help="processes of pytest-xdist, 0 for none")
    parser.add_argument("--fast", action="store_true", help="a selection, on the host in .venv")
    parser.add_argument("pytest_args", nargs="*", help="handed to every pytest run, after --")
    options = parser.parse_args()
    args = ["-n", options.workers, "--dist", "loadfile", *options.pytest_args]

    newest = version("megatron-core")
    outcomes = [run_tool("ruff", "check .", "format --check .")]
    if not options.fast:
        outcomes.append(run_tool("mypy", "megatron_residuals"))
    env = environment(MEGATRON_RESIDUALS_EXPECTED_HOST=newest)
    chosen = FAST_TESTS if options.fast else []
    outcomes.append(run_pytest(f"megatron-core {newest}", Path(sys.executable), chosen + args, env))
    outcomes += [run_host(release, args) for release in options.hosts]
    if any(release.startswith(OLDEST_HOST) for release in options.hosts):
        outcomes.append(run_oldest(args))
    if not options.fast:
        shared = [release for release in options.hosts if not release.startswith(OLDEST_HOST)]
        outcomes += [run_transformer_engine(r, options.pytest_args) for r in (None, *shared)]

    print_slowest(outcomes)
    print_table(outcomes)
    cpu_s = sum(duration.cpu_s for outcome in outcomes for duration in outcome.durations)
    print(f"CPU time of all tests: {cpu_s / 60:.1f} min")
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return int(any(outcome.result == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
