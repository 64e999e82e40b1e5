# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The adapter to Megatron-Core: layer, block, communicator, and the named seams of the host."""
