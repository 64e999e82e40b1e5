# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Predictions from sizes alone: standard library only, runs on a laptop."""
