# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Proves that Triton ran, and that kernels write all of what they return."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class LaunchSpy:
    """Counts the launches of a module's kernels, by name."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def watch(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> None:
        """Put a counter in front of kernels that ``module`` launches."""
        for name in names:
            monkeypatch.setattr(module, name, _Counted(getattr(module, name), name, self.launches))


class _Counted:
    def __init__(self, kernel: Any, name: str, launches: Counter[str]) -> None:
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid: Any) -> Any:
        self._launches[self._name] += 1
        return self._kernel[grid]


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill with NaN what would otherwise be left as it is."""

    def poisoned(allocate: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
