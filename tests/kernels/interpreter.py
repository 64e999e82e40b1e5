# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the interpreter of older Triton versions count loops with a new NumPy."""

from __future__ import annotations

from typing import Any


def repair() -> None:
    """Let a scalar of the interpreter, an array of one number, be the bound of a ``range``.

    NumPy no longer converts such an array to an integer; Triton from 3.9 on does without. Does
    nothing the second time.
    """
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor
    if hasattr(stock, "__wrapped__"):
        return

    def patch(tensor: Any, *scope: Any) -> None:
        stock(tensor, *scope)

        def index(self: Any) -> int:
            return int(self.handle.data.item())

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    patch.__wrapped__ = stock  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
