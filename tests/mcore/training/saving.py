# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the toy in training, as the host's training loop does it."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing, parallel_state

from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.residual_toy import toy_spec
from megatron_residuals.testing.toy_gpt import ToyGPT, ToyResult, merge, setup_parallel
from megatron_residuals.testing.toy_training import ToyTrainer, Training

BLOCKS = "block_attnres(block_sublayers=3)"
MHC = "mhc(streams=2, mhc_convention='dsv4')"  # has a head of its own in the last stage
RESHARDABLE = "fully_reshardable"
DISTRIBUTED = Training(ddp=dict(use_distributed_optimizer=True))
PLAIN = Training()

State = dict[str, torch.Tensor]


class Steps(NamedTuple):
    """What some steps on all ranks left behind."""

    losses: list[list[float]]
    """By step, of every micro-batch, in the order of one process."""
    before: State
    """Parameters before the first of these steps, by global name, whole."""
    saved: State
    """Parameters when the checkpoint was written; empty if none was."""
    after: State


def train(
    toy: ToyGPT,
    residual: str | None,
    training: Training,
    steps: int,
    *,
    load: Path | None = None,
    save: Path | None = None,
    save_after: int = 0,
    sharding: str = RESHARDABLE,
) -> Steps:
    """Some steps on forked ranks, from a checkpoint or anew, with one written on the way."""

    def run() -> tuple[int, list[list[float]], State, State, State]:
        trainer = start(toy, residual, training)
        if load is not None:
            load_into(trainer, load, sharding)
        before, saved, losses = trainer.parameters(), {}, []
        for step in range(steps + 1):
            if save is not None and step == save_after:
                save_from(trainer, save, sharding)
                saved = trainer.parameters()
            if step < steps:
                losses.append(trainer.accumulate())
                trainer.update()
        dp_rank = parallel_state.get_data_parallel_rank()
        return dp_rank, losses, before, saved, trainer.parameters()

    ranks = run_ranks(toy.world_size, run)
    states = [merge([ToyResult([], rank[i]) for rank in ranks]).grads for i in (2, 3, 4)]
    by_dp_rank = {dp_rank: losses for dp_rank, losses, *_ in ranks if any(losses)}
    losses = []
    for step in range(steps):  # data-parallel ranks take the micro-batches in turns
        turns = zip(*(by_dp_rank[dp_rank][step] for dp_rank in range(toy.dp)), strict=True)
        losses.append([loss for turn in turns for loss in turn])
    return Steps(losses, *states)


def start(toy: ToyGPT, residual: str | None, training: Training) -> ToyTrainer:
    """The toy on this rank, with random weights everywhere, in the mechanism too."""
    if not parallel_state.model_parallel_is_initialized():
        setup_parallel(toy)
    return ToyTrainer(toy, residual and toy_spec(toy, residual), training)


def named_chunks(trainer: ToyTrainer) -> list[tuple[str, torch.nn.Module]]:
    """The chunks by the names that the host's training loop gives them."""
    if len(trainer.chunks) == 1:
        return [("model", trainer.chunks[0])]
    return [(f"model{index}", chunk) for index, chunk in enumerate(trainer.chunks)]


def request(trainer: ToyTrainer, sharding: str, *, loading: bool) -> dict[str, Any]:
    """The sharded state dict of the model and its optimizer."""
    metadata = {
        "distrib_optim_sharding_type": sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in named_chunks(trainer)
    }
    optimizer = trainer.optimizer.sharded_state_dict(
        dict(state), is_loading=loading, metadata=metadata
    )
    return {**state, "optimizer": optimizer, "content_metadata": metadata}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The host and torch warn of what they themselves do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_from(trainer: ToyTrainer, folder: Path, sharding: str = RESHARDABLE) -> None:
    """Write a ``torch_dist`` checkpoint."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    state = request(trainer, sharding, loading=False)
    metadata = copy.copy(state.pop("content_metadata"))
    metadata.pop("dp_cp_group")
    with quiet():
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)


def load_into(trainer: ToyTrainer, folder: Path, sharding: str = RESHARDABLE) -> None:
    """Read one back, weights and optimizer."""
    asked = request(trainer, sharding, loading=True)
    del asked["content_metadata"]
    with quiet():
        state = dist_checkpointing.load(asked, str(folder))
    for name, chunk in named_chunks(trainer):
        chunk.load_state_dict(state[name])
    trainer.optimizer.load_state_dict(state["optimizer"])
