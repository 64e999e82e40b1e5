# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron_residuals.cpu_host` under the name that it had first."""

from megatron_residuals.cpu_host import Report, install

__all__ = ["Report", "install"]
