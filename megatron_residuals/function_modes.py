# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modes of torch functions that hold in backward passes too."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

_AUTOGRAD: Any = torch.autograd
_engine_run_backward = _AUTOGRAD._engine_run_backward


class ThroughBackward(TorchFunctionMode):
    """A mode that backward functions and replayed forward passes see as well.

    ``torch.autograd.backward`` is a torch function itself: while one runs, torch has its modes off.
    """

    _on: ClassVar[list[ThroughBackward]] = []
    """Outermost first."""

    def __enter__(self) -> ThroughBackward:
        self._on.append(self)
        _AUTOGRAD._engine_run_backward = self._run_backward
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._on.pop()
        if not self._on:
            _AUTOGRAD._engine_run_backward = _engine_run_backward

    @classmethod
    def _run_backward(cls, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for mode in cls._on:
                TorchFunctionMode.__enter__(mode)
                stack.push(super(ThroughBackward, mode).__exit__)
            return _engine_run_backward(*args, **kwargs)
