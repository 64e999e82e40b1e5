# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter faster, and count loops with a new NumPy in older versions."""

from __future__ import annotations

import functools
from typing import Any


def repair() -> None:
    """Once for this process: see the two parts."""
    from triton.runtime import interpreter

    if not hasattr(interpreter._patch_lang_tensor, "__wrapped__"):
        _repair_range(interpreter)
        _prepare_the_language_once(interpreter)


def _prepare_the_language_once(interpreter: Any) -> None:
    """Do not go through all of `triton.language` again for every function that a kernel calls.

    That is a third of the interpreter's time. Within a launch everything is in place already.
    """
    prepare, core = interpreter._patch_lang, interpreter.tl.core

    def prepare_once(fn: Any) -> Any:
        if core.is_builtin(core.load):
            return prepare(fn)
        scope = getattr(interpreter, "_LangPatchScope", None)
        return scope and scope()

    interpreter._patch_lang = prepare_once
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)


def _repair_range(interpreter: Any) -> None:
    """Let a scalar of the interpreter, an array of one number, be the bound of a ``range``.

    NumPy no longer converts such an array to an integer; Triton from 3.9 on does without.
    """
    stock = interpreter._patch_lang_tensor

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
