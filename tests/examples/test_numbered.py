# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The numbered examples run on a CPU and show what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts import Order, Scripts

ROOT = Path(__file__).resolve().parents[2]
NUMBERED = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))


@pytest.fixture
def run(scripts: Scripts, tmp_path: Path) -> Callable[..., str]:
    """Runs an example by its name, on as many ranks as torchrun would start, for what it prints."""

    def run(name: str, *words: str, ranks: int = 1) -> str:
        (script,) = [path for path in NUMBERED if path.stem[3:] == name]
        done = scripts.run(Order([str(script), *words], tmp_path, ranks))
        assert done.status == 0, done.log
        return done.log

    return run


@pytest.mark.parametrize("script", NUMBERED, ids=lambda path: path.stem)
def test_an_example_is_short(script: Path) -> None:
    most = 150 if script.stem == "06_own_mechanism" else 120  # a whole mechanism
    assert len(script.read_text(encoding="utf-8").splitlines()) < most


def test_the_first_loss_is_that_of_the_stock_model(run: Callable[..., str]) -> None:
    losses = [float(loss) for loss in re.findall(r"first loss (\S+)", run("first_loss"))]
    assert len(losses) == 6
    assert losses == pytest.approx([losses[0]] * 6, abs=2e-6)


def test_a_pipeline_is_planned(run: Callable[..., str]) -> None:
    text = run("plan_a_pipeline")
    assert re.search(r"V=2: full +79, delta +55", text)
    assert re.search(r"V=1: full +(\d+), delta +\1,", text)


@pytest.mark.slow
def test_two_ranks_learn_with_either_mechanism(run: Callable[..., str]) -> None:
    for words in (["mhc"], ["block_attnres(block_layers=1)"], ["mhc", "*-|*|-*|-"]):
        text = run("train_two_ranks", *words, ranks=2)
        losses = [float(loss) for loss in re.findall(r"loss (\d\S+)", text)]
        assert losses[-1] < 0.5 * losses[0]


def test_a_policy_that_fits_is_found(run: Callable[..., str]) -> None:
    assert re.findall(r"take '(\S+)'", run("fit_into_memory")) == ["group", "mix"]


@pytest.mark.slow
def test_the_mechanisms_run_without_megatron_and_show_what_they_do(
    run: Callable[..., str],
) -> None:
    text = run("look_inside")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
    assert len(losses) == 4 and losses[1] < 0.2 * losses[0] and losses[3] < 0.2 * losses[2]
    weights = [float(number) for number in text.strip().splitlines()[-1].strip("[]").split()]
    assert sum(weights) == pytest.approx(1.0, abs=5e-3)


def test_a_model_that_has_learned_to_count_counts_on(run: Callable[..., str]) -> None:
    text = run("generate", "block_attnres(block_layers=1)")
    assert "17 18 19 20 21 22 ->  23 24 25 26 27 28" in text and "30 31 ->  0 1 2 3 4 5" in text


def test_mechanisms_are_compared_from_one_first_loss(
    run: Callable[..., str],
) -> None:
    words = ("--steps", "1", "residual", "ihc", "block_attnres(attnres_heads=4)")
    text = run("compare_mechanisms", *words)
    firsts = [float(first) for first in re.findall(r"\)\s+1\s+\d+\s+(\S+)", text)]
    assert firsts == pytest.approx([firsts[0]] * 3, abs=2e-3)
