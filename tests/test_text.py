# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Faults, tables, sizes and reasons as text."""

from __future__ import annotations

import errno

import pytest

from megatron_residuals.text import (
    fault_list,
    first_few,
    format_bytes,
    raise_faults,
    reason,
    table,
)

ROWS = [{"name": "a", "count": "10", "what": "x"}, {"name": "long", "count": "7", "what": ""}]


def test_columns_are_as_wide_as_their_widest_cell_and_only_the_first_is_left_aligned() -> None:
    assert table(ROWS) == ["name  count  what", "a        10     x", "long      7"]
    assert table(ROWS, left=("count", "what"))[1] == "   a  10     x"


def test_one_fault_stays_on_the_line_of_its_subject_and_several_are_listed() -> None:
    raise_faults("sizes", [])
    with pytest.raises(ValueError, match=r"^sizes: too big$"):
        raise_faults("sizes", ["too big"])
    with pytest.raises(ValueError) as raised:
        raise_faults("sizes", ["too big", "too small"])
    assert str(raised.value) == fault_list("sizes: 2 faults", ["too big", "too small"])
    assert str(raised.value).splitlines()[1:] == ["  - too big", "  - too small"]


def test_of_many_lines_the_first_are_shown_and_the_others_counted() -> None:
    assert first_few(["a", "b"], 2) == ["a", "b"]
    assert first_few(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]


def test_sizes_are_in_the_largest_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**31, 3 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "2.0 GiB",
        "3072.0 TiB",
    ]


def test_the_reason_of_an_error_is_one_line_that_names_its_file() -> None:
    assert reason(OSError(errno.EACCES, "Permission denied", "/x")) == "/x: Permission denied"
    assert reason(OSError("disk")) == "disk"
    assert reason(RuntimeError("\n first\nsecond")) == "first"
    assert reason(EOFError()) == "EOFError"
