# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test with parameters are enough to meet each value of every parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest


def each_value_once(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of every test the fewest cases that one finds by taking the one with most that is missing.

    A test with one `parametrize` keeps all its cases, a product of several about as many as its
    longest list.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        yield from _covering(cases)


def _covering(cases: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    missing = {value for case in cases for value in values_of(case)}
    while missing:
        best = max(cases, key=lambda case: len(missing & values_of(case)))
        missing -= values_of(best)
        yield best


def values_of(case: pytest.Item) -> set[tuple[int, str]]:
    """(number of a `parametrize`, name of its value); a test without any has one value."""
    callspec = getattr(case, "callspec", None)
    return set(enumerate(callspec._idlist)) if callspec else {(0, "")}
