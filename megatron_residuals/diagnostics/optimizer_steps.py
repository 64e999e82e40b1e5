# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of the optimizer, so that a step that nobody ends is noticed."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class OptimizerSteps:
    """Steps of the optimizer since the count began, as training micro-batches see them.

    Parts of an optimizer, or several, that step between two micro-batches count once.
    """

    def __init__(self) -> None:
        self._count, self._has_stepped = 0, False
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Count from now on, from 0."""
        self.end()
        self._count, self._has_stepped = 0, False
        self._handle = register_optimizer_step_post_hook(self._note)

    def end(self) -> None:
        """Stop counting."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def count(self) -> int:
        """The steps so far; to be called for every training micro-batch."""
        self._count += self._has_stepped
        self._has_stepped = False
        return self._count

    def _note(self, *_: Any) -> None:
        self._has_stepped = True
