# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The toy GPT under the host's data parallelism and optimizer, wired as its training loop does.

    result = train_toy(ToyGPT(dp=2, pp=2, vpp=2), spec, ddp=dict(overlap_grad_reduce=True))
    result.grads        # of the first step, after everything the host sums, whole
    result.parameters   # after the last step, whole; every rank that holds one agrees bit for bit

Data parallelism, expert parallelism, context parallelism, gradient accumulation, buckets, 16 bit:
what the host sums or gathers, it sums and gathers itself here, unlike in `toy_gpt.run_toy`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.toy_gpt import (
    SpecLike,
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import (
    Chunk,
    Initialise,
    default_initialise,
    named_globally,
    whole_over_tp,
)


@dataclasses.dataclass(frozen=True)
class Training:
    """How the toy is trained."""

    steps: int = 1
    ddp: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Arguments of `DistributedDataParallelConfig`."""
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Arguments of `OptimizerConfig`, over plain Adam."""
    prepare: Callable[[Sequence[Chunk]], None] | None = None
    """Called with the chunks before they are wrapped: freezes, adds adapters, spies."""


class Trained(NamedTuple):
    """What a training run of the toy computed, merged over its ranks."""

    losses: list[list[float]]
    """By step: the mean loss of every micro-batch, in the order of one process."""
    grads: dict[str, torch.Tensor]
    """Of the first step, by global name, whole; empty where the optimizer is distributed."""
    parameters: dict[str, torch.Tensor]
    """After the last step, by global name, whole."""


class ToyTrainer:
    """The chunks of this rank, wrapped, and their optimizer."""

    def __init__(
        self,
        toy: ToyGPT,
        spec: SpecLike,
        training: Training,
        initialise: Initialise = default_initialise,
    ) -> None:
        self.toy, self.training = toy, training
        self.chunks = build_chunks(toy, spec, initialise=initialise)
        config = self.chunks[0].config
        if training.prepare is not None:
            training.prepare(self.chunks)
        half = config.bf16 or config.fp16
        inner = [Float16Module(config, chunk) if half else chunk for chunk in self.chunks]
        ddp = DistributedDataParallelConfig(**training.ddp)
        self.models = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(inner)
        ]
        self._gathers_late = ddp.overlap_param_gather
        optimizer = OptimizerConfig(
            **{
                "optimizer": "adam",
                "lr": 1e-2,
                # with a tiny eps the rounding of a tiny gradient would be a whole step
                "adam_eps": 1e-2,
                "weight_decay": 0.01,
                # the host clips float32 alone
                "clip_grad": 0.0 if toy.dtype is torch.float64 else 1.0,
                "bf16": config.bf16,
                "fp16": config.fp16,
                "use_distributed_optimizer": ddp.use_distributed_optimizer,
                "overlap_param_gather": ddp.overlap_param_gather,
                **training.optimizer,
            }
        )
        self.optimizer = get_megatron_optimizer(optimizer, list(self.models))
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            syncs = [model.no_sync for model in self.models]
            # the host annotates one function and takes one for each chunk
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]

    def accumulate(self) -> list[float]:
        """Gradients of one step; the losses of this rank's micro-batches on the last stage."""
        for model in self.models:
            model.zero_grad_buffer()
        with _shards_are_views():
            self.optimizer.zero_grad()
        return train_step(self.models, self.toy, keep_grads=True)

    def update(self) -> None:
        """One step of the optimizer."""
        with _shards_are_views():
            succeeded, _, _ = self.optimizer.step()
        assert succeeded, "the optimizer skipped a step: a gradient is not finite"

    def grads(self) -> dict[str, torch.Tensor]:
        """{global name: main gradient} of this rank, whole over TP."""
        return self._whole(lambda parameter: parameter.main_grad)

    def parameters(self) -> dict[str, torch.Tensor]:
        """{global name: parameter} of this rank, whole over TP, once all of it has arrived."""
        if self._gathers_late:
            for model in self.models:
                model.start_param_sync(force_sync=True)
        return self._whole(lambda parameter: parameter.detach())

    def _whole(self, value: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: whole_over_tp(value(parameter).clone(), parameter)
            for chunk in self.chunks
            for name, parameter in named_globally(chunk)
            if parameter.requires_grad
        }


@contextlib.contextmanager
def _shards_are_views() -> Iterator[None]:
    """The distributed optimizer sets gradients on views of parameters; torch warns of reading."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        yield


def train_toy(
    toy: ToyGPT,
    spec: SpecLike = None,
    training: Training = Training(),  # noqa: B008 (frozen)
    *,
    initialise: Initialise = default_initialise,
    timeout_s: float = 60.0,
) -> Trained:
    """Some training steps of the toy on forked ranks.

    Raises:
        RankFailure: a rank failed or hung.
        RuntimeError: two ranks hold the same parameter and disagree, bit for bit, on its gradient
            or on its value after the steps.
    """
    ranks = run_ranks(toy.world_size, _train, toy, spec, training, initialise, timeout_s=timeout_s)
    grads = merge([ToyResult([], grads) for _, _, grads, _ in ranks]).grads
    parameters = merge([ToyResult([], parameters) for *_, parameters in ranks]).grads
    return Trained(_losses(toy, ranks), grads, parameters)


def _train(toy: ToyGPT, spec: SpecLike, training: Training, initialise: Initialise) -> Any:
    setup_parallel(toy)
    trainer = ToyTrainer(toy, spec, training, initialise)
    losses, grads = [], {}
    for step in range(training.steps):
        losses.append(trainer.accumulate())
        if step == 0 and not training.ddp.get("use_distributed_optimizer"):
            grads = trainer.grads()
        trainer.update()
    return parallel_state.get_data_parallel_rank(), losses, grads, trainer.parameters()


def _losses(toy: ToyGPT, ranks: Sequence[Any]) -> list[list[float]]:
    """Losses in the order of one process: DP ranks take turns, CP ranks hold parts of a mean."""
    steps = []
    for step in range(len(ranks[0][1])):
        parts: dict[int, list[list[float]]] = {}
        for dp_rank, losses, *_ in ranks:
            if losses[step]:
                parts.setdefault(dp_rank, []).append(losses[step])
        means = {
            rank: [sum(values) / len(values) for values in zip(*lists, strict=True)]
            for rank, lists in parts.items()
        }
        count = len(means[0])
        steps.append([means[rank][index] for index in range(count) for rank in range(toy.dp)])
    return steps
