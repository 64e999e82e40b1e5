# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where in a step something happens: pass, stage, micro-batch, layer, part of the layer."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from megatron_residuals.modules import ResidualHead, SublayerResidual

ACTIVATIONS, RESIDUAL_PATH, LOGITS = "activations", "residual path", "logits"
OURS = "megatron_residuals"
PARTS = ("self_attention", "mlp", "mixer", "output_layer")
_VERBS = ("begin", "read", "write", "reread", "close")
_EDGES = ("enter", "exit")


class Places:
    """The place that is at work now, told by the host's schedules and by hooks on modules.

    Attributes:
        number: of the place, for ``text``.
    """

    def __init__(self) -> None:
        self.number = 0
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._pass, self._modules = "set-up", [""]
        self._given = [""]
        self._residual_depth, self._logits_shape = 0, -1
        self._batch_of = WeakIdKeyDictionary()
        self._seen: dict[int, int] = {}
        self._names: dict[nn.Module, str] = {}
        self._num_ranks = self._rank = 1
        self._renumber()

    def text(self, number: int) -> str:
        """A place in words."""
        return self._texts[number]

    @property
    def now(self) -> str:
        """The place in words."""
        return self._texts[self.number]

    @property
    def given(self) -> str:
        """What the module at work was given: its tensors [shape] dtype; nothing, if it had none."""
        return self._given[-1]

    def _renumber(self) -> None:
        module = self._modules[-1]
        text = f"{self._pass}, {module}" if module else self._pass
        self.number = self._numbers.setdefault(text, len(self._texts))
        if self.number == len(self._texts):
            self._texts.append(text)

    def kind(self, tensor: Tensor, namespace: str) -> str:
        """What a new tensor is, by where it is made."""
        if self._residual_depth or namespace == OURS:
            return RESIDUAL_PATH
        if tensor.ndim > 1 and tensor.shape[-1] == self._logits_shape:
            return LOGITS
        return ACTIVATIONS

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A pass, or what comes in front of the first and behind the last."""
        before = self._pass, self._modules
        given, self._given = self._given, [""]
        self._pass, self._modules = what, [""]
        self._renumber()
        yield
        # after an error the place stays where it was raised
        (self._pass, self._modules), self._given = before, given
        self._renumber()
        gc.collect()  # when Python finds cycles of its own accord is no property of a launch

    @contextlib.contextmanager
    def _in_residual(self) -> Iterator[None]:
        self._residual_depth += 1
        try:
            yield
        finally:
            self._residual_depth -= 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Schedules and modules tell where they are."""
        from megatron.core.pipeline_parallel import schedules

        enter = nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = nn.modules.module.register_module_forward_hook(self._leave)
        passes = (("forward_step", self._forward), ("backward_step", self._backward))
        with contextlib.ExitStack() as stack:
            stack.callback(enter.remove)
            stack.callback(leave.remove)
            for name, wrap in passes:
                wrapped = wrap(getattr(schedules, name))
                stack.enter_context(mock.patch.object(schedules, name, wrapped))
            for function in _own_functions():
                wrapped = staticmethod(self._of_residual(function.backward))
                stack.enter_context(mock.patch.object(function, "backward", wrapped))
            yield

    def name_parts(self, chunks: Sequence[nn.Module], rank: int, num_ranks: int) -> None:
        """From now on layers, parts and stages have names."""
        self._rank, self._num_ranks = rank, num_ranks
        gc.freeze()  # what is there now need not be looked through behind every pass
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, SublayerResidual | ResidualHead):
                    self._mark(module, _VERBS)
                if hasattr(module, "stage_io"):
                    self._mark(module.stage_io, _EDGES)
                layer = getattr(module, "layer_number", None)
                if "layers." in name and name.rpartition(".")[2].isdecimal():
                    self._names[module] = f"layer {layer}"
                elif name.rpartition(".")[2] in PARTS:
                    self._names[module] = name.rpartition(".")[2]
                elif name.endswith(("embedding", "final_layernorm", "final_norm", "residual_head")):
                    self._names[module] = name.rpartition(".")[2]
                if name.endswith("output_layer"):
                    self._logits_shape = module.output_size_per_partition

    def _mark(self, owner: object, methods: Sequence[str]) -> None:
        for name in methods:
            if hasattr(owner, name):
                setattr(owner, name, self._of_residual(getattr(owner, name)))

    def _of_residual(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self._in_residual():
                return function(*args, **kwargs)

        return marked

    def _enter(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if (name := self._names.get(module)) is not None:
            tensors = (each for each in inputs if isinstance(each, Tensor))
            given = ", ".join(f"{list(each.shape)} {each.dtype}" for each in tensors)
            self._given.append(f" given {given}" if given else "")
            outer = self._modules[-1]
            self._modules.append(f"{outer} {name}" if outer else name)
            self._renumber()

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if module in self._names:
            self._modules.pop()
            self._given.pop()
            self._renumber()

    def _forward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            chunk = getattr(
                _innermost(args[2] if len(args) > 2 else kwargs["model"]), "vp_stage", 0
            )
            stage = (chunk or 0) * self._num_ranks + self._rank
            self._seen[stage] = self._seen.get(stage, 0) + 1
            place = f"stage {stage}, micro-batch {self._seen[stage] - 1}"
            with self.during(f"forward of {place}"):
                returned = stock(*args, **kwargs)
            output = returned[0] if isinstance(returned, tuple) else returned
            output = output[0] if isinstance(output, list) else output
            if isinstance(output, Tensor):
                self._batch_of[output] = place
            return returned

        return forward_step

    def _backward(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            with self.during(f"backward of {self._batch_of.get(output, 'a micro-batch')}"):
                return stock(input_tensor, output_tensor, *args, **kwargs)

        return backward_step


def _own_functions() -> list[type[torch.autograd.Function]]:
    """What of autograd is ours, in whatever module."""
    found = torch.autograd.Function.__subclasses__()
    return [each for each in found if each.__module__.startswith(f"{OURS}.")]


def _innermost(model: nn.Module) -> nn.Module:
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner
