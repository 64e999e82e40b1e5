# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of one mechanism that do not go together."""

from __future__ import annotations

import pytest

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms import BLOCK_ATTNRES
from tests.test_config import faults_of


@pytest.mark.parametrize("option", [dict(attnres_heads=4), dict(attnres_additive=True)], ids=str)
def test_reads_by_heads_and_sums_have_no_kernels_and_no_phases(option: dict[str, object]) -> None:
    assert BLOCK_ATTNRES.two_phase(ResidualConfig("block_attnres", **option)) == "off"  # type: ignore[arg-type]
    asked = (({"two_phase": "on"}, "reads in one"), ({"kernels": "triton"}, "use auto"))
    for more, said in asked:
        (fault,) = faults_of(mechanism="block_attnres", **option, **more)
        assert next(iter(option)) in fault and said in fault


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(mhc_mixing="permutations", mhc_convention="dsv4"), "leave mhc_convention out"),
        (dict(mhc_mixing="permutations", streams=6), "permutations of 6; at most 120"),
        (dict(mhc_mixing="kronecker", streams=14), "prime factors are at most 5, or sinkhorn"),
    ],
    ids=str,
)
def test_mixing_that_there_is_not_is_refused(options: dict[str, object], said: str) -> None:
    (fault,) = faults_of(mechanism="mhc", **options)
    assert said in fault
    ResidualConfig("mhc", mhc_mixing="kronecker", streams=30)
