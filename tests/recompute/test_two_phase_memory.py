# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The few numbers that reads in one and in two phases keep, predicted to the last one or nearly."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.retained import measure_step
from tests.recompute.test_memory_formulas import MECHANISMS, case

# one number per token and read more or less would be several times as much
ALLOWED = 1e-4


@pytest.mark.parametrize("two_phase", ["auto", "on", "off"])
@pytest.mark.parametrize(
    ("pipeline", "mechanism", "policy"),
    [("one", "cut blocks", "none"), ("one", "blocks", "mix"), ("pp2", "cut blocks", "none")],
)
def test_kept_bytes_are_those_predicted(
    pipeline: str, mechanism: str, policy: str, two_phase: str
) -> None:
    this = case(pipeline)
    residual = dataclasses.replace(MECHANISMS[mechanism], recompute=policy, two_phase=two_phase)
    predicted = this.plan(residual).predict()
    measured = measure_step(this.toy, spec_for(residual))
    for memory, (kept, peak, _) in zip(predicted.ranks, measured, strict=True):
        assert abs(sum(memory.kept_parts.values()) / kept - 1) < ALLOWED
        assert abs(memory.peak_bytes / peak - 1) < ALLOWED


def test_two_phases_keep_fewer_numbers() -> None:
    this = case("one")
    kept = {}
    for two_phase in ("auto", "off"):
        residual = dataclasses.replace(
            MECHANISMS["cut blocks"], recompute="mix", two_phase=two_phase
        )
        kept[two_phase] = this.plan(residual).predict().worst.kept_bytes
    assert kept["auto"] < kept["off"]
