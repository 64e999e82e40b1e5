# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A policy is taken by the mechanisms that it is defined for, and refused by the others by name."""

from __future__ import annotations

import pytest

from megatron_residuals.config import ResidualConfig


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mhc(recompute='block')", ["'block'", "block_attnres", "'mhc' allows none, mix, group"]),
        ("hc(recompute='block+layer')", ["'block+layer'", "'hc' allows none, mix, group"]),
        ("attnres(recompute='group')", ["'group'", "'attnres' allows none, mix, block"]),
        ("residual(recompute='mix')", ["'mix'", "'residual' allows none"]),
        ("mhc(recompute='group:0')", ["'group:0'", "at least 1"]),
        ("mhc(recompute='group:-1')", ["'group:-1'", "at least 1"]),
        ("mhc(recompute='group:two')", ["'group:two'", "at least 1"]),
        ("attnres(recompute='block:2')", ["'block:2'", "allowed: none, mix, group, block"]),
        ("mhc(recompute='full')", ["'full'", "allowed: none, mix, group, block"]),
    ],
)
def test_a_policy_that_a_mechanism_does_not_have_is_refused_by_name(
    text: str, words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        ResidualConfig.parse(text)
    for word in words:
        assert word in str(error.value)
