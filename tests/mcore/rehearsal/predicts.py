# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The example's training script, which has no multi-token prediction, with it on one stage."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples import pretrain_gpt  # noqa: E402

if __name__ == "__main__":
    refused = pretrain_gpt.REFUSED_ARGS
    pretrain_gpt.REFUSED_ARGS = tuple(name for name in refused if name != "mtp_num_layers")
    pretrain_gpt.main()
