# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What both operators share: the choice of a backend, autograd, and pieces of kernels."""
