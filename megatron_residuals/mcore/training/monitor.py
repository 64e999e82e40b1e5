# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Records every K-th training step of a model and writes it where the run keeps its figures.

Built with ``log_interval=0``, a model is never touched. Otherwise the blocks of a model share one
monitor, which puts hooks on them for the steps that are recorded and takes them off behind each.
Between recorded steps, the end of a step costs a comparison of integers.

In Megatron's training loop ``training_log`` ends a step: it runs on every rank once after each, in
all supported versions, and ``train`` looks it up by name. With a loop of your own, call
``log_step`` on every rank after each optimizer step. Where nobody ends the recorded step, recording
stops with a warning.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_residuals.diagnostics.fields import fields_for
from megatron_residuals.diagnostics.kept import KeptBytes
from megatron_residuals.diagnostics.optimizer_steps import OptimizerSteps
from megatron_residuals.diagnostics.probes import probe_for
from megatron_residuals.diagnostics.recorder import Reader, StageRecorder, StepSums, Visit
from megatron_residuals.diagnostics.records import Record, series_of
from megatron_residuals.mcore.block import ResidualBlockMixin
from megatron_residuals.mcore.route import Route, live_routes
from megatron_residuals.mcore.training.publish import Publisher
from megatron_residuals.pipeline.messages import Direction

logger = logging.getLogger(__name__)
NEVER_ENDED = 2  # steps of the optimizer within a recorded step: no loop calls log_step so late
# The loop that calls ``log_step`` names no model: it ends the step of the one built last.
_current: weakref.ref[Monitor] | None = None


def log_step(
    iteration: int,
    losses: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> Record | None:
    """End a training step; to be called on every rank, after the backward passes of the step.

    For training loops other than Megatron's own, which is followed without a call. Collective over
    all ranks when the step was recorded: the first step of a process, and every
    ``log_interval``-th.

    Args:
        iteration: number of the step that has ended, from 1 on.
        losses: by name; numbers or tensors of one element, which are read only when a step is
            recorded. Those of the last rank count.
        figures: other numbers of the step, as the learning rate.

    Returns:
        What was recorded, on the last rank; None elsewhere and for steps that are not recorded.
    """
    monitor = _current() if _current is not None else None
    return monitor.log_step(iteration, losses or {}, figures or {}) if monitor else None


def ends_steps(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``training_log`` that calls ``log_step`` behind it.

    Raises:
        RuntimeError: the host's function has no ``iteration`` or ``loss_dict`` (any more).
    """
    signature = inspect.signature(stock)
    if not {"iteration", "loss_dict"} <= signature.parameters.keys():
        raise RuntimeError(
            "megatron.training.training.training_log has no iteration and loss_dict among "
            f"{list(signature.parameters)}; this Megatron is not one that megatron_residuals was "
            "tested with. Leave --residual-log-interval out"
        )

    @functools.wraps(stock)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        returned = stock(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        figures = {"learning-rate": given.get("learning_rate"), "grad-norm": given.get("grad_norm")}
        log_step(given["iteration"], given["loss_dict"], figures)
        return returned

    return training_log


def observe(block: ResidualBlockMixin) -> None:
    """Record the steps of a block's model; all its blocks share one monitor."""
    global _current
    route = block.stage_io.route
    if not isinstance(route.monitor, Monitor):
        route.monitor = monitor = Monitor(route, block)
        _current = weakref.ref(monitor)
    route.monitor.watch(block)


class Monitor:
    """Records the steps of one model on this rank."""

    def __init__(self, route: Route, block: ResidualBlockMixin) -> None:
        self._route, self._interval = route, route.residual.log_interval
        self._probe = probe_for(route.residual, route.plan.depth)
        self._fields = fields_for(route.plan, self._probe)
        self._world, self._rank = _world_and_rank()
        pipeline = dist.get_process_group_ranks(block.pg_collection.pp) if self._world > 1 else [0]
        # of the pipelines side by side (data, context, tensor parallel) one speaks for parameters
        self._is_first_replica = 0 in pipeline
        self._replicas = self._world // len(pipeline)
        self._stages: list[_Stage] = []
        self._sums: StepSums | None = None
        self._loss_scale: torch.Tensor | None = None
        self._received: Counter[tuple[Direction, int]] = Counter()
        self._armed = True  # the first step of a process: nobody knows its number yet
        self._optimizer_steps = OptimizerSteps()
        self._optimizer_steps.begin()
        weakref.finalize(self, self._optimizer_steps.end)
        self._losses: dict[int, dict[str, Any]] = {}
        self._publisher = Publisher(route, block.config)

    def watch(self, block: ResidualBlockMixin) -> None:
        """Record one more stage of the model."""
        stage = _Stage(block, self)
        self._stages.append(stage)
        if self._armed:
            stage.arm()

    def new_stage_recorder(self, block: ResidualBlockMixin, on_done: Any) -> StageRecorder:
        """The recorder of a stage, with the global places of its residual modules."""
        modules = [module for layer in block.layers for module in layer.residuals]
        places = self._route.plan.layout.sublayers(block.stage_io.stage)
        sublayers = list(map(Reader, places, modules))
        head = block.residual_head
        last = self._route.plan.layout.num_sublayers
        return StageRecorder(
            self._probe, sublayers, Reader(last, head) if head is not None else None, on_done
        )

    @property
    def sums(self) -> StepSums:
        """The vector of the step that is being recorded."""
        if self._sums is None:
            device = torch.cuda.current_device()  # the CPU, where the host runs there
            self._sums = StepSums(self._fields, device, composite=self._is_first_replica)
        return self._sums

    def note_step(self, config: Any) -> None:
        """Note what counts the bytes of this step; ask for the loss scale before it changes.

        The scale stays on the device.
        """
        self._received = self._route.step.received
        if self._loss_scale is None and config.grad_scale_func is not None:
            one = torch.ones((), dtype=torch.float64, device=self.sums.flat.device)
            self._loss_scale = config.grad_scale_func(one)

    def log_step(
        self, iteration: int, losses: Mapping[str, Any], figures: Mapping[str, Any]
    ) -> Record | None:
        """End a step; see the function of this name."""
        if self._route not in live_routes():  # torch.distributed was started again since
            self._set_armed(False)
            return None
        if losses and self._rank == self._world - 1:
            self._losses[iteration] = dict(losses)
        record = self._finish(iteration, figures) if self._armed else None
        armed = (iteration + 1) % self._interval == 0
        if armed or self._armed:
            self._set_armed(armed)
        return record

    def _set_armed(self, armed: bool) -> None:
        for stage in self._stages:
            stage.arm() if armed else stage.disarm()
        self._optimizer_steps.begin() if armed else self._optimizer_steps.end()
        self._armed = armed

    def is_ended_in_time(self) -> bool:
        """Whether the recorded step, in which a micro-batch begins, goes on; if not, it is dropped.

        Otherwise all steps would be recorded as one, at the price of recording each.
        """
        if self._optimizer_steps.count() < NEVER_ENDED:
            return True
        self._set_armed(False)
        self._sums = self._loss_scale = None
        if self._rank == self._world - 1:
            logger.warning(
                "residual_log_interval is %d, but nothing says when a step is over: call "
                "megatron_residuals.mcore.monitor.log_step(iteration, losses) on every rank after "
                "each optimizer step. Nothing is recorded until it is called",
                self._interval,
            )
        return False

    def _finish(self, iteration: int, figures: Mapping[str, Any]) -> Record | None:
        sums, self._sums = self.sums, None
        for stage in self._stages:
            stage.recorder.finish(sums)
        if self._loss_scale is not None:
            self._fields.view(sums.flat, "gradient_square").div_(self._loss_scale.square())
            self._loss_scale = None
        self._add_host_figures(sums)
        if self._world > 1:
            dist.reduce(sums.flat, dst=self._world - 1)
        if self._rank != self._world - 1:
            return None
        flat, losses = self._to_host(sums.flat)
        series, matrices = series_of(flat, self._fields, self._probe)
        numbers = {name: float(value) for name, value in figures.items() if value is not None}
        record = Record(iteration, series, matrices, losses, numbers)
        self._publisher.publish(record)
        return record

    def _to_host(self, flat: torch.Tensor) -> tuple[torch.Tensor, dict[int, dict[str, float]]]:
        """The vector and the losses since the last record, in one copy."""
        kept, self._losses = self._losses, {}
        names = [(i, name) for i, by_name in kept.items() for name in by_name]
        values = [
            torch.as_tensor(kept[i][name], dtype=flat.dtype, device=flat.device).detach().view(-1)
            for i, name in names
        ]
        everything = torch.cat([flat, *[value[:1] for value in values]]).cpu()
        losses: dict[int, dict[str, float]] = {}
        for (i, name), value in zip(names, everything[len(flat) :].tolist(), strict=True):
            losses.setdefault(i, {})[name] = value
        return everything[: len(flat)], losses

    def _add_host_figures(self, sums: StepSums) -> None:
        """Bytes, which every rank counts on the host; one upload."""
        own = self._fields.zeros("cpu")

        def view(name: str) -> torch.Tensor:
            return self._fields.view(own, name)

        for (direction, boundary), size in self._received.items():
            view(f"bytes_{direction}")[boundary - 1] = size
        for stage in self._stages:
            view("kept_bytes")[stage.index] = stage.kept_bytes / self._replicas
            if self._is_first_replica:
                view("parameters_added")[0] += stage.num_parameters
        held = max((stage.cache_bytes for stage in self._stages), default=0)
        view("cache_bytes")[self._route.rank] = held / self._replicas
        sums.flat += own.to(sums.flat.device)


class _Stage:
    """One block: where a micro-batch enters and leaves it."""

    def __init__(self, block: ResidualBlockMixin, monitor: Monitor) -> None:
        self.index = block.stage_io.stage
        self.num_parameters = sum(p.numel() for _, p in block.residual_parameters())
        self.kept_bytes = self.cache_bytes = 0
        self.recorder = monitor.new_stage_recorder(block, self._on_done)
        self._block, self._monitor = weakref.ref(block), monitor
        self._handles: list[Any] = []
        self._kept: KeptBytes | None = None
        self._is_measured = False

    def arm(self) -> None:
        """Record from now on; start anew if this is recorded already."""
        self.disarm()
        self.kept_bytes = self.cache_bytes = 0
        self._is_measured = False
        block = self._block()
        if block is None:
            return
        self._handles = [
            block.register_forward_pre_hook(self._begin),
            block.register_forward_hook(self._end, always_call=True),
        ]
        block.runner.watch = self.recorder.watched
        self.recorder.arm()

    def disarm(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if (block := self._block()) is not None:
            block.runner.watch = None
        self.recorder.disarm()

    def _begin(self, block: ResidualBlockMixin, inputs: Any) -> None:
        if not block.training or not torch.is_grad_enabled():
            return
        if not self._monitor.is_ended_in_time():
            return
        self.recorder.begin()
        self._monitor.note_step(block.config)
        if not self._is_measured:
            self._kept = KeptBytes(list(block.parameters()))
            self._kept.begin()

    def _end(self, block: ResidualBlockMixin, inputs: Any, output: Any) -> None:
        if self._kept is not None:
            self.kept_bytes, self._kept = self._kept.end(), None
            self._is_measured = True
        self.recorder.end()

    @torch.no_grad()
    def _on_done(self, visit: Visit) -> None:
        visit.add_to(self._monitor.sums)
        held = self._monitor._route.step.cache.num_values * visit.row_bytes
        self.cache_bytes = max(self.cache_bytes, held)


def _world_and_rank() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
