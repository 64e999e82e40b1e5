# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plays a training step of a pipeline from sizes alone: standard library only."""
