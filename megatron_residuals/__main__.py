# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_residuals``: the console command, where its script is not on PATH."""

from __future__ import annotations

import sys

from megatron_residuals.cli import main

sys.exit(main())
