# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The study: its design, its statistics, its page, and a short run of it."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.study import results
from examples.study.analysis import Interval, Row, corrected, main_table
from examples.study.design import FEWER, FIRST, PLAIN, SEEDS, TUNING_SEED, Cell, main, tuning
from examples.study.report import report
from examples.study.results import Result

ROOT = Path(__file__).parents[2]
POINTS = [[20.0 * i, 3.0 - 0.02 * i] for i in range(1, 51)]


def result(arm: str, seed: int, loss: float, rate: float = 4e-3, iterations: int = 1000) -> Result:
    cell = Cell(arm, seed, rate, iterations=iterations)
    return Result(cell, validation=[[iterations, loss]], train=POINTS, cpu_s=1.0)


def tuned(arm: str, best: float) -> list[Result]:
    return [replace(result(arm, 0, abs(cell.rate - best)), cell=cell) for cell in tuning(arm)]


def test_a_cell_is_found_by_its_name_and_others_are_refused() -> None:
    cell = Cell("mhc", 3, 4e-3, 24)
    assert Cell.parse(cell.name) == cell
    with pytest.raises(ValueError, match="'nosuch-L12-1000it-lr0.004-seed1' names no cell: give"):
        Cell.parse("nosuch-L12-1000it-lr0.004-seed1")


def test_rates_are_chosen_first_and_then_seeds_come_in_whole_pairs() -> None:
    before = list(main({}))
    assert {cell.seed for cell in before} == {TUNING_SEED}
    assert [cell.arm for cell in before[:9]] == [arm for arm in FIRST for _ in range(3)]
    best = {PLAIN: 8e-3, "mhc": 2e-3, "block": 4e-3}
    known = results.losses([line for arm, rate in best.items() for line in tuned(arm, rate)])
    paired = [cell for cell in main(known) if cell.seed in SEEDS]
    assert [(cell.seed, cell.arm) for cell in paired] == [(s, a) for s in SEEDS for a in FIRST]
    assert {cell.arm: cell.rate for cell in paired} == best
    # an arm that failed at two rates has the third
    known |= {cell.name: math.inf for cell in tuning("hc")[1:]} | {tuning("hc")[0].name: 3.0}
    assert {cell.rate for cell in main(known) if cell.arm == "hc" and cell.seed in FEWER} == {2e-3}


def test_intervals_and_corrections_are_those_of_the_textbook() -> None:
    # t(0.975, 2) = 4.3027, standard error 1 / sqrt(3)
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2 and interval.high == pytest.approx(2 + 4.302653 / math.sqrt(3))
    row = Row("", {}, 0, 0.0, {1: -1.0}, math.nan, math.nan, {}, 1.0)
    rows = corrected([replace(row, p=p) for p in (0.04, 0.01, math.nan, 0.03)])
    assert [row.holm for row in rows] == pytest.approx([0.06, 0.03, math.nan, 0.06], nan_ok=True)
    answers = [row.answer for row in rows]
    assert answers == ["no difference seen", "better", "too few runs", "no difference seen"]


def test_the_table_pairs_by_seed_and_keeps_what_failed() -> None:
    lines = [*tuned(PLAIN, 4e-3), *tuned("mhc", 4e-3)]
    lines += [result(PLAIN, seed, 2.0 + 0.1 * seed) for seed in SEEDS]
    lines += [result(PLAIN, seed + 10, 2.0 + 0.1 * seed + 0.01 * seed) for seed in (1, 2)]
    # seed 3 of another rate does not count, nor does a failed run, nor one without its pair
    lines += [result("mhc", seed, 1.9 + 0.1 * seed + 1e-3 * (seed == 2)) for seed in (1, 2)]
    lines += [result("mhc", 3, 0.0, rate=8e-3), results.failure(Cell("mhc", 4, 4e-3), "boom")]
    plain, again, mhc = main_table(lines)
    assert plain.loss.mean == pytest.approx(2.3) and not any(plain.difference.values())
    assert again.difference == pytest.approx({1: 0.01, 2: 0.02})
    assert again.answer == "no difference seen"
    assert mhc.difference == pytest.approx({1: -0.1, 2: -0.099}) and mhc.failed == 1
    assert mhc.answer == "better" and mhc.holm == mhc.p
    assert mhc.tokens == {1: 1.0, 2: 1.0}


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results.append(file, result("mhc", 1, 2.0))
    assert [line.line for line in results.read(file)] == [result("mhc", 1, 2.0).line]
    with file.open("a") as lines:
        lines.write('{"cell": 3}\n')
    with pytest.raises(ValueError, match=r"results.jsonl, line 2 is not a run of the study"):
        results.read(file)


def test_the_page_says_what_the_committed_results_say(tmp_path: Path) -> None:
    page = shutil.copy(ROOT / "docs" / "study.md", tmp_path)
    report(results.read(ROOT / "docs" / "study" / "results.jsonl"), Path(page))
    assert Path(page).read_text() == (ROOT / "docs" / "study.md").read_text()
    drawn = {path.name for path in (tmp_path / "study").glob("*.png")}
    assert drawn == {path.name for path in (ROOT / "docs" / "study").glob("*.png")}


@pytest.mark.slow
def test_a_short_study_runs_once_and_is_reported(tmp_path: Path) -> None:
    words = ["--iterations", "20", "--folder", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results.jsonl"), "--scope", "quick"]
    command = [sys.executable, "-W", "ignore", "-m", "examples.study.run", *words]
    first = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert first.stdout.count("validation loss") == 3, first.stdout
    lines = results.read(tmp_path / "results.jsonl")
    assert {line.cell.arm for line in lines} == set(FIRST)
    for line in lines:
        assert not line.failed and line.validation[-1][0] == 20 and line.cpu_s > 0
        assert line.validation[-1][1] < line.validation[0][1] < math.log(257) + 0.5
        assert len(line.seen["residual/hidden_rms"]) == 25
    again = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert "validation loss" not in again.stdout
