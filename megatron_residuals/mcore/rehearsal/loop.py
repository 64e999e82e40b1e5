# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The host's training loop with mock data, up to the end of its first step."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron_residuals.mcore.rehearsal import devices
from megatron_residuals.mcore.rehearsal.places import Places
from megatron_residuals.mcore.training.reading import with_transformer_engine


class StepIsOver(BaseException):
    """Ends a script behind its first step; no ``except Exception`` may stop it."""


@dataclass
class LoopStep:
    """What the training loop has shown of itself."""

    model: Sequence[nn.Module] = ()
    optimizer: Any = None
    is_over: bool = False


@contextlib.contextmanager
def loop_of_one_step(step: LoopStep, places: Places, *, on_gpu: bool) -> Iterator[None]:
    """The host's own loop, without files of others, until ``StepIsOver`` leaves it.

    Args:
        step: is told what the loop has built.
        places: is told what is at work.
        on_gpu: whether layers that need a GPU are to be stood in for.
    """
    from megatron.core.tensor_parallel import random as host_random
    from megatron.training import global_vars, initialize, training

    set_up, train = training.setup_model_and_optimizer, training.train_step

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        with places.during("building the model"):
            model, optimizer, scheduler = set_up(*args, **kwargs)
        step.model, step.optimizer = model, optimizer
        places.name_parts(model, *_pipeline_place())
        return model, optimizer, scheduler

    def train_step(*args: Any, **kwargs: Any) -> Any:
        with places.during("outside the passes"):
            train(*args, **kwargs)
        step.is_over = True
        raise StepIsOver

    count = global_vars.init_num_microbatches_calculator
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as checks:
        if on_gpu:
            checks.enter_context(with_transformer_engine())

        def init_num_microbatches_calculator(*args: Any, **kwargs: Any) -> None:
            count(*args, **kwargs)
            checks.close()
            _settle(global_vars.get_args(), stack, on_gpu=on_gpu)

        for owner, name, value in (
            (global_vars, count.__name__, init_num_microbatches_calculator),
            (global_vars, "_set_tensorboard_writer", _nothing),
            (global_vars, "_set_wandb_writer", _nothing),
            (global_vars, "_set_one_logger", _nothing),
            (initialize, "_compile_dependencies", _nothing),
            (initialize, "_initialize_tp_communicators", _nothing),
            (training, "setup_model_and_optimizer", setup_model_and_optimizer),
            (training, "train_step", train_step),
            (training, "build_train_valid_test_data_iterators", _mock_data),
            (host_random.CudaRNGStatesTracker, "fork", _no_fork),
            (host_random, "_set_cuda_rng_state", _nothing),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_fork(*args: Any, **kwargs: Any) -> Any:
    """Random states have no values here."""
    return contextlib.nullcontext()


def _settle(args: argparse.Namespace, stack: contextlib.ExitStack, *, on_gpu: bool) -> None:
    """What of a launch a rehearsal does without: checkpoints, and layers that are not here."""
    args.load = args.pretrained_checkpoint = args.save = None
    if on_gpu and args.transformer_impl == "transformer_engine":
        stack.enter_context(devices.transformer_engine(args))


def _mock_data(provider: object) -> tuple[Any, None, None]:
    """Batches of the sizes that the arguments say, in place of the script's data."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args

    args = get_args()
    args.do_train, args.do_valid, args.do_test = True, False, False
    return RerunDataIterator(_batches(args)), None, None


def _batches(args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    b, s = args.micro_batch_size, args.seq_length
    while True:
        batch = {
            "tokens": torch.zeros(b, s, dtype=torch.int64),
            "labels": torch.zeros(b, s, dtype=torch.int64),
            "loss_mask": torch.ones(b, s),
            "position_ids": torch.arange(s).repeat(b, 1),
        }
        if args.create_attention_mask_in_dataloader:
            batch["attention_mask"] = torch.ones(b, 1, s, s, dtype=torch.bool)
        yield batch


def _pipeline_place() -> tuple[int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
