# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the forward of one stage leaves behind for its backward, without asking the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_residuals.recompute.accounting import RetainedBytes


class KeptBytes:
    """Measures one forward, between ``begin`` and ``end``.

    On a GPU it is the growth of allocated memory, a counter that the host keeps. The CPU has no
    such counter: there autograd's saved tensors are counted, parameters apart.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._on_gpu = any(parameter.is_cuda for parameter in parameters)
        self._allocated = 0
        self._retained: RetainedBytes | None = None
        self._parameters = parameters

    def begin(self) -> None:
        """The forward is about to run."""
        if self._on_gpu:
            self._allocated = torch.cuda.memory_allocated()
        else:
            self._retained = RetainedBytes(exclude=self._parameters)
            self._retained.__enter__()

    def end(self) -> int:
        """It has run, or raised; bytes kept."""
        if self._on_gpu:
            return torch.cuda.memory_allocated() - self._allocated
        if self._retained is None:
            return 0
        self._retained.__exit__(None, None, None)
        kept, self._retained = self._retained.measure().bytes, None
        return kept
