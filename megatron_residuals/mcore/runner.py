# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the layers of a stage on a residual state, with checkpoints where the policy puts them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import layer_quantization_context
from megatron_residuals.modules import ResidualState, SourceState
from megatron_residuals.pipeline.plan import TransferPlan
from megatron_residuals.pipeline.segments import (
    HostFull,
    stage_group_length,
    stage_segments,
)
from megatron_residuals.recompute.steps import GroupStep, MixStep, NarrowStep, Step, plain_step


class StageRunner:
    """The loop over the sublayers of one stage.

    Attributes:
        segments: how they are cut for recomputation.
        group_length: sublayers for which streams are kept once, under the ``group`` policy.
        watch: what diagnostics make of a step; None where they do not look.
    """

    watch: Callable[[Step], Step] | None = None

    def __init__(
        self,
        residual: ResidualConfig,
        config: Any,
        plan: TransferPlan,
        stage: int,
        layers: Sequence[Any],
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        self._residual, self._config, self._tp_group = residual, config, tp_group
        self._sublayers, self._depth = plan.layout.sublayers(stage), plan.depth
        self._places = [(layer, i) for layer in layers for i in range(len(layer.residuals))]
        host_full = None
        if config.recompute_granularity == "full":
            host_full = HostFull(config.recompute_method, config.recompute_num_layers)
        self.segments = stage_segments(residual, plan.layout, plan.depth, stage, host_full)
        self.group_length = stage_group_length(residual, len(self._sublayers))
        if residual.recompute_policy in ("mix", "group"):
            for layer in layers:
                layer.discard_norms()

    def run(self, state: Any, arguments: dict[str, Any], *, training: bool) -> Any:
        """The state behind the last sublayer of the stage."""
        step = self._step()
        for segment in self.segments:
            if segment.checkpoint and training and torch.is_grad_enabled():
                state = self._checkpoint(state, segment.sublayers, segment.inner, arguments)
            else:
                state = self._run(state, segment.sublayers, arguments, step)
        return state

    def _step(self) -> Step:
        if self.group_length is not None:
            return self._watched(GroupStep(self.group_length, len(self._sublayers)))
        is_mix = self._residual.recompute_policy == "mix"
        return self._watched(MixStep() if is_mix else plain_step)

    def _watched(self, step: Step) -> Step:
        if self._config.fp32_residual_connection:
            step = NarrowStep(step, self._config.params_dtype)
        return step if self.watch is None else self.watch(step)

    def _run(
        self, state: ResidualState, sublayers: range, arguments: dict[str, Any], step: Step
    ) -> ResidualState:
        for part in self._residual.entry.parts(self._residual, self._depth, sublayers):
            places = [self._places[i - self._sublayers.start] for i in part]
            readers = [layer.residuals[index] for layer, index in places]
            state = readers[0].begin(readers, state)
            for layer, of_layer in itertools.groupby(places, lambda place: place[0]):
                parts = [index for _, index in of_layer]
                with layer_quantization_context(self._config, layer.layer_number - 1):
                    state = layer(state, step=step, parts=parts, **arguments)
        return state

    def _checkpoint(
        self, state: Any, sublayers: range, inner: tuple[range, ...], arguments: dict[str, Any]
    ) -> ResidualState:
        """The state behind some sublayers of which only the state in front is kept."""

        def run(state: ResidualState) -> ResidualState:
            if not inner:
                return self._run(state, sublayers, arguments, self._watched(plain_step))
            for part in inner:
                state = self._checkpoint(state, part, (), arguments)
            return state

        if isinstance(state, SourceState):
            return self._checkpoint_sources(state, sublayers, run)
        unpack = functools.partial(self._residual.entry.unpack, self._residual)

        def inside(payload: Tensor) -> Tensor:
            after = run(unpack(payload))
            assert not isinstance(after, SourceState)
            return after.pack()

        return unpack(self._call(inside, state.pack()))

    def _checkpoint_sources(
        self,
        state: SourceState,
        sublayers: range,
        run: Callable[[ResidualState], ResidualState],
    ) -> SourceState:
        """Sources pass around the checkpoint by reference; inside, their list grows anew each time.

        A source that the first sublayer closes is the running sum in front of it: the outer state
        takes that tensor itself. Only sources closed further inside come out of the run.
        """
        assert self._depth is not None, "the state has depth sources"
        opens_here = self._depth.opens_block(sublayers.start)
        known = len(state.sources) + opens_here

        def inside(partial: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
            after = run(SourceState.of(sources, partial))
            assert isinstance(after, SourceState)
            return after.partial, *after.sources[known:]

        partial, *closed = self._call(inside, state.partial, *state.outgoing)
        for source in (state.partial, *closed) if opens_here else closed:
            state = state.closed(source)
        return state._replace(partial=partial)

    def _call(self, fn: Callable[..., Any], first: Tensor, *others: Tensor) -> Any:
        if not any(tensor.requires_grad for tensor in (first, *others)):
            # nothing in front trains; without this, nothing inside would get a gradient either
            first = first.detach().requires_grad_()
        if self._config.fp8 or getattr(self._config, "fp4", None):
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(fn, False, tracker, self._tp_group, first, *others)
        return tensor_parallel.checkpoint(fn, False, first, *others)
