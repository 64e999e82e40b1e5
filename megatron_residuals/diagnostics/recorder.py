# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hooks that record one training step of a stage, and are taken off behind it.

    stage runs forward      a visit begins: hooks of residual modules look at what passes
    stage is done           the visit's sums are added to the step's vector; it ends
    backward, replays       no visit, so nothing is looked at twice; gradients pass hooks that were
                            put on tensors wherever autograd recorded (in a replay under a
                            checkpoint, in the first forward otherwise), so once

Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_residuals.diagnostics.fields import COMPOSITE_TOKENS, Fields
from megatron_residuals.diagnostics.probes import Probe
from megatron_residuals.diagnostics.tokens import sample_tokens


class Reader(NamedTuple):
    """A residual module and its place: a global sublayer index, or their number for the head."""

    index: int
    module: nn.Module


class StepSums:
    """The vector of sums of one rank and step.

    Attributes:
        composite: whether this rank's tokens are those whose mixing matrices are taken home whole.
    """

    def __init__(
        self, fields: Fields, device: torch.device | int | str, *, composite: bool
    ) -> None:
        self.fields, self.flat, self.composite = fields, fields.zeros(device), composite

    def add(self, name: str, rows: slice, values: Tensor | float) -> None:
        """Add to some rows of a field."""
        self.fields.view(self.flat, name)[rows].add_(values)


class Visit:
    """One micro-batch in one stage, as seen by the hooks of its residual modules."""

    def __init__(self, probe: Probe, *, is_first: bool) -> None:
        self.probe, self.is_first = probe, is_first
        self.row_bytes = 0
        self._looked: dict[str, dict[int, Tensor]] = {}

    def keep(self, name: str, index: int, value: Tensor) -> None:
        """Keep a small tensor of one reader until the stage is done."""
        self._looked.setdefault(name, {})[index] = value

    def add_to(self, sums: StepSums) -> None:
        """Add everything that was kept, by field."""
        stacked, rows = {}, {}
        for name, by_index in self._looked.items():
            indices = sorted(by_index)
            rows[name] = slice(indices[0], indices[-1] + 1)
            stacked[name] = torch.stack([by_index[index] for index in indices])
        if "hidden" not in stacked:
            return
        sums.add("tokens", rows["hidden"], stacked["hidden"].shape[1])
        for name in ("hidden", "output"):
            if name in stacked:
                sums.add(f"{name}_square", rows[name], stacked[name].sum(1))
        looked = {name: stacked[name] for name in stacked if name not in ("hidden", "output")}
        if not looked:
            return
        place = rows[next(iter(looked))]
        for name, values in self.probe.sums(looked).items():
            sums.add(name, place, values)
        if "res" in looked and self.is_first and sums.composite:
            tokens = looked["res"].shape[1]
            res = looked["res"][:, :: -(-tokens // COMPOSITE_TOKENS)]
            matrices = sums.fields.view(sums.flat, "matrices")
            matrices[place, : res.shape[1]].add_(res)
            sums.add("matrix_tokens", place, res.shape[1])


class StageRecorder:
    """Records the visits of one stage while it is armed.

    Args:
        probe: of the mechanism.
        sublayers: the residual modules of the stage's sublayers, in order.
        head: the one in front of the final norm, where it is in this stage.
        on_done: called with every visit that has ended.
    """

    def __init__(
        self,
        probe: Probe,
        sublayers: Sequence[Reader],
        head: Reader | None,
        on_done: Callable[[Visit], None],
    ) -> None:
        self._probe, self._sublayers, self._head = probe, sublayers, head
        self._on_done = on_done
        self._handles: list[Any] = []
        self._visit: Visit | None = None
        self._visits = 0
        self._gradients: dict[int, tuple[Tensor, int]] = {}  # sum of squares, number of tokens
        self._parameters: dict[int, dict[str, Tensor]] = {}

    def arm(self) -> None:
        """Put the hooks on."""
        self._visits = 0
        self._gradients.clear()
        self._parameters.clear()
        for reader in self._sublayers:
            hook = functools.partial(self._after_read, reader.index)
            self._handles.append(reader.module.register_forward_hook(hook))
            # not a submodule and not called as one, so there is no hook: take its place
            write = functools.partial(self._write, reader.index, reader.module.write)
            reader.module.write = write
        if self._head is not None:
            self._handles.append(self._head.module.register_forward_hook(self._after_close))

    def disarm(self) -> None:
        """Take the hooks off."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for reader in self._sublayers:
            del reader.module.write

    def begin(self) -> None:
        """A training micro-batch enters the stage."""
        self._visit = Visit(self._probe, is_first=self._visits == 0)
        self._visits += 1

    def end(self) -> None:
        """It has left the stage, or raised inside."""
        visit, self._visit = self._visit, None
        if visit is not None:
            self._on_done(visit)

    def finish(self, sums: StepSums) -> None:
        """Add what came with the backward passes, and figures of the parameters in the step."""
        for index, (square, tokens) in self._gradients.items():
            sums.add("gradient_square", slice(index, index + 1), square)
            sums.add("gradient_tokens", slice(index, index + 1), tokens)
        self._gradients.clear()
        if sums.composite:
            for index, figures in self._parameters.items():
                for name, values in figures.items():
                    sums.add(name, slice(index, index + 1), values)

    @torch.no_grad()
    def _after_read(self, index: int, module: nn.Module, inputs: Any, result: Any) -> None:
        visit = self._visit
        if visit is None or inputs[0] is None:  # a call that only asks for parameters
            return
        x, pending = result
        visit.row_bytes = x.numel() * x.element_size()
        self._look(visit, index, module, x, inputs[0], pending)

    @torch.no_grad()
    def _after_close(self, module: nn.Module, inputs: Any, hidden: Tensor) -> None:
        visit = self._visit
        if visit is None or self._head is None:
            return
        self._look(visit, self._head.index, module, hidden, inputs[0], None)

    def _look(
        self, visit: Visit, index: int, module: nn.Module, x: Tensor, state: Any, pending: Any
    ) -> None:
        visit.keep("hidden", index, _mean_square(x))
        for name, value in self._probe.look(module, state, pending).items():
            visit.keep(name, index, value)
        if visit.is_first:  # here, since wrappers that gather parameters do so for a call
            self._parameters[index] = self._probe.parameters(module)

    def _write(self, index: int, stock: Callable[..., Any], pending: Any, output: Tensor) -> Any:
        if self._visit is not None:
            with torch.no_grad():
                self._visit.keep("output", index, _mean_square(output))
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(functools.partial(self._on_gradient, index))
        return stock(pending, output)

    @torch.no_grad()
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        squares = _mean_square(gradient)
        square, tokens = self._gradients.get(index, (0, 0))
        self._gradients[index] = (square + squares.sum(), tokens + len(squares))


def _mean_square(x: Tensor) -> Tensor:
    """mean_d x^2 of sampled tokens.    [..., d] -> [S]"""
    return sample_tokens(x, 1).square().mean(-1)
