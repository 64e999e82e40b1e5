# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packages that are not installed, with what a test wants in them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from megatron_residuals.kernels.depth_attention import libraries


def provide(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """A module of that dotted name with these functions, found by imports; nothing compared yet."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        parent = ".".join(parts[:length])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    for key, function in functions.items():
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, name, module)
    libraries._check.cache_clear()


def take_away(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Importing the module fails as if it were not there."""
    monkeypatch.setitem(sys.modules, name, None)
    libraries._check.cache_clear()
