# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a folder that transformers loads without Megatron and without this package."""
