# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sources that a pipeline rank keeps for its later stages, and the way home of their gradients.

The life of a source of one micro-batch on a rank, with stage g the one that first has it and stages
g + P, g + 2P the ones that read it again:

    forward    g  stash              g+P  fetch            g+2P  fetch: the value is dropped
    backward   g+2P  deposit         g+P  deposit          g  collect: the slot is gone

A stage's backward starts after that of every later stage, so the stage that stashed a source finds
all deposits there when its own backward begins. Their number is known from the plan; a missing or
extra one means a lost or doubled gradient and is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Key = tuple[int, int]  # (micro-batch, source)


@dataclass
class Slot:
    """One source of one micro-batch on one rank.

    The value is an alias of the tensor in the owner's graph, which keeps its memory alive anyway:
    nothing is copied.
    """

    value: Tensor | None
    fetches: int
    deposits_due: int
    gradient: Tensor | None = None


class SourceCache:
    """Slots by micro-batch and source. Values are [s, b, h] like every source."""

    def __init__(self) -> None:
        self._slots: dict[Key, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_values(self) -> int:
        """Sources whose value is still to be fetched."""
        return sum(slot.value is not None for slot in self._slots.values())

    def clear(self) -> None:
        """Forget everything, as at the start of a step."""
        self._slots.clear()

    def stash(self, micro_batch: int, source: int, value: Tensor, *, fetches: int) -> bool:
        """Keep a source for ``fetches`` later stages; whether gradients will come back for it.

        Raises:
            RuntimeError: the source is already there.
        """
        key = (micro_batch, source)
        if key in self._slots:
            raise RuntimeError(
                f"{_name(key)} is stashed twice on this rank; the plan sends it once"
            )
        returns = value.requires_grad and torch.is_grad_enabled()
        self._slots[key] = Slot(value.detach(), fetches, fetches if returns else 0)
        return returns

    def fetch(self, micro_batch: int, source: int) -> Tensor:
        """A stashed source as a leaf of the fetching stage's graph.

        Its gradient is deposited when that stage's backward has computed it. The last fetch drops
        the value.

        Raises:
            RuntimeError: the source is not there, or was fetched as often as planned.
        """
        key = (micro_batch, source)
        slot = self._slots.get(key)
        if slot is None or slot.value is None:
            raise RuntimeError(
                f"{_name(key)} is not on this rank (any more); a stage ran out of the order of the "
                "plan, or more often than planned"
            )
        leaf = slot.value.detach()
        slot.fetches -= 1
        if slot.fetches == 0:
            slot.value = None
        if slot.deposits_due > 0:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(lambda tensor: self._deposit(key, tensor))
        elif slot.value is None:
            del self._slots[key]
        return leaf

    def _deposit(self, key: Key, leaf: Tensor) -> None:
        slot = self._slots.get(key)
        if slot is None or slot.deposits_due == 0:
            raise RuntimeError(
                f"{_name(key)}: a gradient came back after all planned ones; a stage ran its "
                "backward twice, or after the stage that owns the source"
            )
        slot.deposits_due -= 1
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "the hook runs right after the gradient was accumulated"
        slot.gradient = gradient if slot.gradient is None else slot.gradient.add_(gradient)

    def collect(self, micro_batch: int, source: int) -> Tensor:
        """The sum of the deposited gradients, for the stage that stashed the source.

        Raises:
            RuntimeError: fewer gradients came back than the plan says.
        """
        key = (micro_batch, source)
        slot = self._slots.pop(key, None)
        if slot is None:
            raise RuntimeError(f"{_name(key)}: no slot to collect gradients from")
        if slot.deposits_due or slot.gradient is None:
            raise RuntimeError(
                f"{_name(key)}: {slot.deposits_due} of its gradients did not come back; a later "
                "stage of this rank skipped its backward, and its gradient would be lost"
            )
        return slot.gradient


def _name(key: Key) -> str:
    return f"micro-batch {key[0]}, source {key[1]}"
