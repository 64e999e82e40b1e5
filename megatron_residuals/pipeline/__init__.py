# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Depth state across pipeline stages: the plan and the cache."""
