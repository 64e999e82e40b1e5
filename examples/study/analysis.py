# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs, intervals and the rule for "better", as `docs/study.md` states them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from examples.study import results
from examples.study.design import (
    ARMS,
    FIRST,
    ITERATIONS,
    OTHERS,
    PLAIN,
    SAME,
    SAME_OFFSET,
    SEEDS,
    rate_of,
)
from examples.study.results import Result

CONFIDENCE = 0.95
SMOOTHED = 5
"""Points of the training curve that are averaged before it is asked when it reached a loss."""


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided t-interval; `low` and `high` are NaN for one value."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of at least one value."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, math.nan, math.nan)
        low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=mean, scale=stats.sem(values))
        return cls(mean, float(low), float(high))


@dataclass(frozen=True)
class Row:
    """One arm of a table.

    Attributes:
        runs: by seed, those that ended well.
        failed: how many did not.
        rate: the learning rate.
        loss: final validation losses.
        difference: to the plain residual of the same seed, by seed.
        p: of the paired t-test; NaN with fewer than two pairs.
        holm: the same after Holm's correction over the table.
        tokens: share of the plain residual's tokens after which the training loss is the plain
            residual's last, by seed; infinite where it never is.
        cost: CPU time of an iteration over the plain residual's.
    """

    title: str
    runs: dict[int, Result]
    failed: int
    rate: float
    difference: dict[int, float]
    p: float
    holm: float
    tokens: dict[int, float]
    cost: float

    @property
    def loss(self) -> Interval:
        """Over seeds."""
        return Interval.of([run.loss for run in self.runs.values()])

    @property
    def answer(self) -> str:
        """By the rule of the design."""
        if math.isnan(self.holm):
            return "too few runs"
        if self.holm >= 1 - CONFIDENCE:
            return "no difference seen"
        return "better" if np.mean(list(self.difference.values())) < 0 else "worse"


def main_table(all_results: list[Result]) -> list[Row]:
    """Plain first, the A/A arm second, then every arm that has a run beside a plain one."""
    plain = select(all_results, PLAIN, seeds=SEEDS)
    if not plain:
        return []
    again = select(all_results, PLAIN, seeds=[seed + SAME_OFFSET for seed in SEEDS])
    again = {seed - SAME_OFFSET: run for seed, run in again.items()}
    rows = [row(ARMS[PLAIN].title, plain, plain, all_results)]
    arms = [
        row(ARMS[arm].title, select(all_results, arm), plain, all_results)
        for arm in (*FIRST, *OTHERS)
        if arm != PLAIN and select(all_results, arm)
    ]
    if again:
        rows.append(row(SAME, again, plain, all_results))
        rows[-1] = replace(rows[-1], holm=rows[-1].p)
    return rows + corrected(arms)


def side_table(all_results: list[Result], arms: Sequence[tuple[str, str, int]]) -> list[Row]:
    """Rows of (title, arm, layers), each beside the plain residual of that depth."""
    rows = []
    for title, arm, layers in arms:
        runs = select(all_results, arm, layers)
        plain = select(all_results, PLAIN, layers)
        if runs and plain:
            rows.append(row(title, runs, plain, all_results))
    return corrected(rows)


def select(
    all_results: list[Result], arm: str, layers: int = 12, seeds: Sequence[int] = SEEDS
) -> dict[int, Result]:
    """The runs of a table by seed, failed ones too; those of tuning have other lengths."""
    chosen = rate_of(arm, results.losses(all_results))
    return {
        result.cell.seed: result
        for result in all_results
        if result.cell.arm == arm
        and result.cell.layers == layers
        and result.cell.iterations == ITERATIONS
        and result.cell.rate == chosen
        and result.cell.seed in seeds
    }


def row(
    title: str, runs: dict[int, Result], plain: dict[int, Result], all_results: list[Result]
) -> Row:
    """The figures of an arm; `holm` is still to come."""
    good = {seed: run for seed, run in runs.items() if not run.failed}
    both = [seed for seed in good if seed in plain and not plain[seed].failed]
    difference = {seed: good[seed].loss - plain[seed].loss for seed in both}
    is_plain = runs is plain
    p = math.nan
    if len(both) > 1 and not is_plain:
        p = float(stats.ttest_1samp(list(difference.values()), 0.0).pvalue)
    cost = np.median([run.cpu_s for run in good.values()] or [math.nan])
    return Row(
        title,
        good,
        len(runs) - len(good),
        next(iter(runs.values())).cell.rate,
        difference,
        p,
        math.nan,
        {seed: share_of_tokens(good[seed], plain[seed]) for seed in both},
        float(cost / np.median([run.cpu_s for run in plain.values() if not run.failed])),
    )


def corrected(rows: list[Row]) -> list[Row]:
    """Holm: the k-th smallest of m p-values times m - k + 1, never below a smaller one's."""
    order = sorted((row.p, index) for index, row in enumerate(rows) if not math.isnan(row.p))
    least, done = 0.0, list(rows)
    for place, (p, index) in enumerate(order):
        least = max(least, min(1.0, p * (len(order) - place)))
        done[index] = replace(rows[index], holm=least)
    return done


def share_of_tokens(run: Result, plain: Result) -> float:
    """When the smoothed training loss first is at most the plain residual's last."""
    iterations, losses = smoothed(run)
    _, reference = smoothed(plain)
    reached = np.flatnonzero(losses <= reference[-1])
    return float(iterations[reached[0]] / iterations[-1]) if len(reached) else math.inf


def smoothed(run: Result) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and trailing means of the training loss."""
    iterations, losses = np.array(run.train).T
    window = min(SMOOTHED, len(losses))
    means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    return iterations[window - 1 :], means
