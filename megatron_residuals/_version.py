# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The version, in one place; `setup.py` reads this file as text: one plain assignment."""

__version__ = "0.1.0"
