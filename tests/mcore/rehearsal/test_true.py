# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A rehearsal against the same launch run for real over gloo: what every rank keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore.rehearsal.launches import (
    CASES,
    LASTING,
    Case,
    beside_lasting,
    for_real,
    rehearsed,
)
from tests.scripts import Scripts

pytestmark = pytest.mark.timeout(240)
FIRST, *OTHERS = CASES


@pytest.mark.parametrize(
    "case",
    [FIRST, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)],
    ids=lambda case: case.name,
)
def test_a_rehearsal_finds_what_every_rank_keeps_for_real(
    case: Case, scripts: Scripts, tmp_path: Path
) -> None:
    pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")
    real = for_real(scripts, case, tmp_path)
    fake = rehearsed(scripts, case, tmp_path, "--cpu-host")
    for seen, said in zip(real, fake, strict=True):
        kept = {kind: seen["bytes"][kind] for kind in LASTING}
        assert kept == {kind: said["bytes"][kind] for kind in LASTING}
        assert min(kept.values()) > 0
        assert beside_lasting(said) == pytest.approx(beside_lasting(seen), rel=0.01)
        assert said["hops"] == seen["hops"]
        assert all(hop["bytes"] == hop["planned_bytes"] for hop in said["hops"])
