# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs *unmodified* Megatron-Core (0.16 to 0.19) on a CPU with gloo: the demo, tests, measurements.

    from megatron_residuals import cpu_host
    print(cpu_host.install())            # before megatron.core is imported
    from megatron.core import parallel_state

What a CPU run cannot show: races between streams, NCCL's ordering of messages, device memory
(`torch.cuda.memory_*` reads 0), fp8, CUDA graphs.
"""

from __future__ import annotations

from megatron_residuals.cpu_host.installation import Report, install

__all__ = ["Report", "install"]
