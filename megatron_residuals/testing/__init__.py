# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Test kit: ranks as forks, a toy GPT, one table of tolerances.

`toy_gpt` imports Megatron-Core and is therefore imported by name, on a CPU after the `install()` of
`megatron_residuals.cpu_host`, which is found here too.
"""

from __future__ import annotations

from megatron_residuals.cpu_host import Report, install
from megatron_residuals.testing.ranks import RankFailure, run_ranks
from megatron_residuals.testing.tolerances import assert_close

__all__ = ["RankFailure", "Report", "assert_close", "install", "run_ranks"]
