# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: their layout, what crosses between them, and what every rank keeps."""
