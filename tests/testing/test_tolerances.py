# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tolerance table and the message of a comparison that fails."""

from __future__ import annotations

import pytest
import torch

from megatron_residuals.testing import assert_close
from megatron_residuals.testing.tolerances import TOLERANCES


def test_exact_allows_nothing_and_every_step_of_the_table_allows_more() -> None:
    for dtype in {dtype for dtype, _ in TOLERANCES}:
        exact, same, reordered = (
            TOLERANCES[dtype, kind] for kind in ("exact", "same_math", "reordered")
        )
        assert exact == (0.0, 0.0)
        assert 0 < same.rtol < reordered.rtol and 0 < same.atol < reordered.atol


def test_a_miss_names_the_tensor_the_place_and_both_errors() -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    actual = expected.clone()
    actual[1, 0] = 3.5
    with pytest.raises(AssertionError) as failure:
        assert_close(actual, expected, dtype=torch.float32, kind="same_math", name="query grad")
    message = str(failure.value)
    assert message.startswith("query grad: max abs error 5.000e-01, max rel error 1.667e-01")
    assert "at (1, 0): got 3.5, expected 3;" in message


def test_one_unit_in_the_last_place_fails_exact_and_passes_same_math() -> None:
    expected = torch.tensor([1.0])
    actual = torch.nextafter(expected, torch.tensor([2.0]))
    with pytest.raises(AssertionError):
        assert_close(actual, expected, dtype=torch.float32, kind="exact")
    assert_close(actual, expected, dtype=torch.float32, kind="same_math")


def test_nan_is_no_number_and_shapes_are_not_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"at \(0,\): got nan, expected 1"):
        assert_close(
            torch.tensor([float("nan")]), torch.ones(1), dtype=torch.float64, kind="reordered"
        )
    with pytest.raises(AssertionError, match=r"shape \(1,\), expected \(2,\)"):
        assert_close(torch.ones(1), torch.ones(2), dtype=torch.float64, kind="exact")
