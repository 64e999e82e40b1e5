# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Records one training step of a stage: its sublayers run in watched steps, its head has a hook.

    stage runs forward      a visit begins: what residual modules read and write is looked at
    stage is done           the visit's sums are added to the step's vector; it ends
    backward, replays       no visit, so nothing is looked at twice; gradients pass hooks that were
                            put on tensors wherever autograd recorded (in a replay under a
                            checkpoint, in the first forward otherwise), so once

Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_residuals.diagnostics.fields import Fields
from megatron_residuals.diagnostics.probes import Probe
from megatron_residuals.diagnostics.tokens import sample_tokens
from megatron_residuals.recompute.steps import Step


@dataclass(frozen=True)
class Reader:
    """A residual module and its place: a global sublayer index, or their number for the head."""

    index: int
    module: nn.Module


class StepSums:
    """The vector of sums of one rank and step.

    Attributes:
        composite: whether this rank's tokens are those whose figures are taken home whole.
    """

    def __init__(
        self, fields: Fields, device: torch.device | int | str, *, composite: bool
    ) -> None:
        self.fields, self.flat, self.composite = fields, fields.zeros(device), composite

    def add(self, name: str, rows: slice | tuple[slice, ...], values: Tensor | float) -> None:
        """Add to some rows of a field, or to the front of them."""
        self.fields.view(self.flat, name)[rows].add_(values)


class Visit:
    """One micro-batch in one stage, as its reads and writes show it."""

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
        if self.is_first and sums.composite:
            for name, values in self.probe.whole(looked).items():
                sums.add(name, (place, *map(slice, values.shape[1:])), values)


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
        self._places = {id(reader.module): reader.index for reader in sublayers}
        self._handles: list[Any] = []
        self._visit: Visit | None = None
        self._visits = 0
        self._gradients: dict[int, tuple[Tensor, int]] = {}  # sum of squares, number of tokens
        self._parameters: dict[int, dict[str, Tensor]] = {}

    def arm(self) -> None:
        """Begin to watch the head; ``watched`` steps are the runner's."""
        self._visits = 0
        self._gradients.clear()
        self._parameters.clear()
        if self._head is not None:
            self._handles.append(self._head.module.register_forward_hook(self._after_close))

    def disarm(self) -> None:
        """Stop watching the head."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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

    def watched(self, step: Step) -> Step:
        """A step that runs each sublayer before the eyes of this recorder."""

        def watched_step(residual: Any, state: Any, sublayer: Any) -> Any:
            index = self._places[id(residual)]
            return step(cast(Any, _Watched(self, index, residual)), state, sublayer)

        return watched_step

    @torch.no_grad()
    def after_read(
        self, index: int, module: nn.Module, state: Any, x: Tensor, pending: Any
    ) -> None:
        """A sublayer has read."""
        visit = self._visit
        if visit is not None:
            visit.row_bytes = x.numel() * x.element_size()
            self._look(visit, index, module, x, state, pending)

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

    def before_write(self, index: int, output: Tensor) -> None:
        """A sublayer has returned its output."""
        if self._visit is not None:
            with torch.no_grad():
                self._visit.keep("output", index, _mean_square(output))
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(functools.partial(self._on_gradient, index))

    @torch.no_grad()
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        squares = _mean_square(gradient)
        square, tokens = self._gradients.get(index, (0, 0))
        self._gradients[index] = (square + squares.sum(), tokens + len(squares))


class _Watched:
    """A residual module whose reads and writes a recorder sees."""

    def __init__(self, recorder: StageRecorder, index: int, residual: Any) -> None:
        self._recorder, self._index, self._residual = recorder, index, residual
        self.rereader = residual.rereader

    def read(self, state: Any) -> tuple[Tensor, Any]:
        x, pending = self._residual.read(state)
        self._recorder.after_read(self._index, self._residual, state, x, pending)
        return x, pending

    def write(self, pending: Any, output: Tensor) -> Any:
        self._recorder.before_write(self._index, output)
        return self._residual.write(pending, output)


def _mean_square(x: Tensor) -> Tensor:
    """mean_d x^2 of sampled tokens.    [..., d] -> [S]"""
    return sample_tokens(x, 1).square().mean(-1)
