# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Passes through the tiny model, watched: what runs how often, and every tensor on the way."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.modules import StreamState
from megatron_residuals.recompute.steps import Step
from tests.functional.loops import random_tensors
from tests.modules.tiny_model import TinyModel, tokens


class Counted:
    """A residual module that counts what is called of it, and notes the streams it reads."""

    def __init__(self, module: Any, run: Run) -> None:
        # replays hold this object, and must not hold the run with all its tensors
        self._module, self._calls, self._run = module, run.calls, weakref.ref(run)

    def read(self, state: Any) -> Any:
        self._calls["read"] += 1
        x, pending = self._module.read(state)
        if isinstance(state, StreamState) and (run := self._run()) is not None:
            run.fronts.append(pending.streams)
        return x, pending

    def reread(self, pending: Any) -> Any:
        return self.rereader(pending)()

    def rereader(self, pending: Any) -> Callable[[], Any]:
        again = self._module.rereader(pending)

        def counted() -> Any:
            self._calls["reread"] += 1
            return again()

        return counted

    def write(self, pending: Any, output: Tensor) -> Any:
        self._calls["write"] += 1
        return self._module.write(pending, output)


class Run:
    """One pass through the tiny model with a step, watched.

    Attributes:
        states: tensors of the state in front of every sublayer, and behind the last.
        fronts: streams in front of every sublayer.
        inputs, outputs: x and y of every sublayer.
    """

    def __init__(
        self, residual: str, step: Step, dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        self.model = TinyModel(ResidualConfig.parse(residual), random_residual=0.5)
        self.model.to(dtype)
        self.calls: Counter[str] = Counter()
        self.states: list[tuple[Tensor, ...]] = []
        self.fronts: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.logits = self._forward(step, **options)

    def _forward(
        self,
        step: Step,
        *,
        prepare: Callable[[TinyModel], None] = lambda model: None,
        raise_at: int | None = None,
    ) -> Tensor:
        prepare(self.model)
        state: Any = self.model.open(tokens())
        for i, module in enumerate(self.model.residuals):
            self.states.append(tuple(tensors(state)))
            state = step(self._watched(module), state, self._sublayer(i, raise_at))  # type: ignore[arg-type]
        if isinstance(state, StreamState):
            state = state.settled()
        self.states.append(tuple(tensors(state)))
        return self.model.close(state)

    def _watched(self, module: Any) -> Any:
        return Counted(module, self)

    def _sublayer(self, i: int, raise_at: int | None) -> Callable[[Tensor], Tensor]:
        def sublayer(x: Tensor) -> Tensor:
            self.calls["F"] += 1
            if i == raise_at:
                raise ArithmeticError("a sublayer failed")
            output = self.model.shared.sublayers[i](x)
            self.inputs.append(x)
            self.outputs.append(output)
            return output

        return sublayer

    def backward(self) -> dict[str, Tensor | None]:
        """Gradients by parameter name, of a random cotangent."""
        cotangent = random_tensors(7)(*self.logits.shape).to(self.logits.dtype)
        self.logits.backward(cotangent)
        return {name: p.grad for name, p in self.model.named_parameters()}

    def all_tensors(self) -> Iterator[Tensor]:
        yield from self.inputs
        yield from self.outputs
        yield from self.fronts
        for state in self.states:
            yield from state

    def forget(self) -> list[weakref.ref[Tensor]]:
        """Drop every reference of this object, and leave weak ones."""
        watched = [weakref.ref(tensor) for tensor in self.all_tensors()]
        self.states, self.fronts, self.inputs, self.outputs = [], [], [], []
        return watched


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for member in state:
            yield from tensors(member)


def is_empty(tensor: Tensor) -> bool:
    return tensor.untyped_storage().size() == 0


def assert_same_gradients(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(actual[name], gradient), name


def assert_same_values(run: Run, plain: Run) -> None:
    """Everything that was given up is there again, as it was."""
    assert torch.equal(run.logits, plain.logits)
    for mine, theirs in zip(run.all_tensors(), plain.all_tensors(), strict=True):
        assert torch.equal(mine, theirs)
