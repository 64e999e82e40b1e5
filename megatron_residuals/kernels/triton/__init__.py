# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels and the custom operators around them; imported only when Triton is chosen.

In every kernel ``p_`` is a pointer, ``o_`` offsets, ``m_`` a mask, ``b_`` a block of values and
``i_`` the index of a program. Token counts are run-time numbers that cause no recompilation,
addresses have 64 bits, sums are float32 in an order that depends on shapes alone.
"""
