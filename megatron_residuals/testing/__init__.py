# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Test kit: Megatron-Core on a CPU, ranks as forks, a toy GPT, one table of tolerances.

`toy_gpt` imports Megatron-Core and is therefore imported by name, after `install()`.
"""

from __future__ import annotations

from megatron_residuals.testing.cpu_host import Report, install
from megatron_residuals.testing.ranks import RankFailure, run_ranks
from megatron_residuals.testing.tolerances import assert_close

__all__ = ["RankFailure", "Report", "assert_close", "install", "run_ranks"]
