# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The plain residual connection: the baseline, bitwise equal to the host's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_residuals.mechanisms.base import Mechanism, Place

if TYPE_CHECKING:
    from types import ModuleType

    from megatron_residuals.config import ResidualConfig
    from megatron_residuals.mechanisms.plain.module import PlainResidual


class Plain(Mechanism):
    """h' = h + F(norm(h)). Its checkpoints are stock ones: nothing of it is in them."""

    summary = "the running sum (the baseline, bitwise the stock model)"
    recompute = ()
    kernels = "nothing to compute but the host's sum"
    is_stock = True

    def build_sublayer(self, config: ResidualConfig, place: Place) -> PlainResidual:
        """x = h,  h' = h + y."""
        from megatron_residuals.mechanisms.plain.module import PlainResidual

        return PlainResidual()

    def exported(self) -> ModuleType:
        """The running sum."""
        from megatron_residuals.mechanisms.plain import exported

        return exported


PLAIN = Plain("residual")
