# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Changes that leave every number as it is and only keep a CPU test from waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def disable_torch_compile() -> str:
    """The host's `jit_fuser` is `torch.compile`: 3 s of imports per rank, 40 s of g++ builds."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    def compile_nothing(model: Any = None, **kwargs: object) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compile_nothing
    return "torch.compile: off, fused functions run eagerly"


def fork_checkpoint_queue() -> str:
    """The host spawns a manager per rank (fork is unsafe with CUDA): `__main__` and torch again."""
    import torch.multiprocessing as multiprocessing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def results_queue(mp_mode: str = "fork") -> Any:
        if filesystem_async._results_queue is None:
            manager = multiprocessing.get_context("fork").Manager()
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, results_queue)
    return "dist_checkpointing: result queue of a forked manager, not a spawned one"


def share_storage_in_python() -> str | None:
    """From 0.17 `CheckpointWithoutOutput` builds a C++ extension at first use (g++, 40 s)."""
    from megatron.core.tensor_parallel import random as host_random

    if not hasattr(host_random, "_get_share_storage"):
        return None

    def share(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.untyped_storage().resize_(source.untyped_storage().size())
            target.untyped_storage().copy_(source.untyped_storage())

    def get_share_storage() -> Callable[[torch.Tensor, torch.Tensor], None]:
        return share

    host_random._get_share_storage = get_share_storage
    return "CheckpointWithoutOutput: storage copied in Python, no C++ extension is built"
