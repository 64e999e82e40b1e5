# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Training that starts from the weights of a plain model, as the stock host saved them.

    … --load PLAIN --finetune --residual block_attnres        in a training run
    with start_from_plain(): model.load_state_dict(plain)     in library use

The parameters of the residual keep their initial values, with which every mechanism computes what
the plain model computes, up to the eps of the norms. Everything else must be in the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_residuals.interchange.names import (
    is_model_key,
    is_of_residual,
    is_residual_key,
    missing_keys,
)
from megatron_residuals.mcore.arguments import global_args
from megatron_residuals.mcore.training.checkpoint import checked_load
from megatron_residuals.modules.base import Float32Module
from megatron_residuals.settings import RECORD
from megatron_residuals.text import fault_list

_allowed: ContextVar[bool] = ContextVar("start from a plain model", default=False)
_SHARDED = (ShardedTensor, ShardedObject)
# Ways of the host to go on without keys that the checkpoint lacks, which a user has to ask for.
_LENIENT = ("log_unexpected", "log_all", "ignore_all", "return_unexpected", "return_all")


@contextlib.contextmanager
def start_from_plain() -> Iterator[None]:
    """Inside, models with a residual load checkpoints of plain models; new parameters stay.

    In a training run the host's flag ``--finetune`` (or ``--pretrained-checkpoint``) does the same.
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def is_allowed() -> bool:
    """Whether a plain checkpoint is what the user means to start from."""
    return _allowed.get() or bool(getattr(global_args(), "finetune", False))


def guarded_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load`` with everything that a residual asks of a checkpoint."""
    return warm_start_load(checked_load(stock))


def warm_start_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load`` that takes plain checkpoints where the user means to.

    Requests of models without a residual, and checkpoints with one, pass unchanged.

    Raises:
        ValueError: the checkpoint lacks parameters of the host, or the optimizer's state is wanted
            too, which a plain model has for its own parameters only.
    """

    @functools.wraps(stock)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if is_allowed() and _is_of_residual(sharded_state_dict):
            stored = _stored_keys(checkpoint_dir)
            if stored and not any(map(is_residual_key, stored)):
                _check_request(sharded_state_dict, stored, checkpoint_dir, kwargs.get("strict"))
                sharded_state_dict = dict_list_map_outplace(_keep, sharded_state_dict)
        return stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load


def keep_initial_values(
    block: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    *_: Any,
) -> None:
    """Hook in front of ``load_state_dict`` of a block: the same for plain state dicts.

    The host's training loop goes on after a strict load that failed, hence parameters of the host
    are missed here, not left to torch.

    Raises:
        ValueError: the state dict lacks parameters of the host's.
    """
    if not is_allowed() or any(map(is_residual_key, state_dict)):
        return
    if metadata.get("assign_to_params_buffers"):
        _give_memory(block, state_dict)
    own = {prefix + name: value for name, value in block.state_dict().items()}
    new = {key for key in own if is_residual_key(key)}
    host = [key for key in own if key not in new and isinstance(own[key], torch.Tensor)]
    missing = missing_keys(host, state_dict)
    if new and missing:
        raise ValueError(_lacks(missing, "the state dict"))
    state_dict.update({key: own[key] for key in new})
    if new and strict:
        _announce(len(new), len(host), "a state dict")


def _give_memory(block: torch.nn.Module, state_dict: dict[str, Any]) -> None:
    """Initial values, beside those to be assigned, for what was born on the meta device."""
    given = (value.device for value in state_dict.values() if isinstance(value, torch.Tensor))
    device = next(given, torch.device("cpu"))
    for module in block.modules():
        if isinstance(module, Float32Module) and any(p.is_meta for p in module.parameters()):
            module.to_empty(device=device)


def _is_new(key: str) -> bool:
    return is_of_residual(key) or f".{RECORD}." in key


def _is_of_residual(sharded_state_dict: Any) -> bool:
    values = nested_values(sharded_state_dict)
    return any(isinstance(value, _SHARDED) and _is_new(value.key) for value in values)


def _tensor_keys(values: Iterable[Any]) -> Iterator[str]:
    """Keys of what is requested from tensors of the checkpoint."""
    for value in values:
        if isinstance(value, ShardedTensorFactory):
            yield from _tensor_keys(nested_values(value.build()))
        elif isinstance(value, ShardedTensor):
            yield value.key


def _stored_keys(checkpoint_dir: Any) -> list[str]:
    """Keys in a checkpoint; none where it is no local folder of that format."""
    if not Path(str(checkpoint_dir), ".metadata").is_file():
        return []
    return list(FileSystemReader(str(checkpoint_dir)).read_metadata().state_dict_metadata)


def _check_request(
    sharded_state_dict: Any, stored: Iterable[str], checkpoint_dir: Any, strict: Any
) -> None:
    requested = dict.fromkeys(_tensor_keys(nested_values(sharded_state_dict)))
    if not all(map(is_model_key, requested)):
        raise ValueError(
            f"{checkpoint_dir} is of a plain model, whose optimizer has no state for the "
            "residual's parameters; load the model without the optimizer"
        )
    host = [key for key in requested if not _is_new(key)]
    missing = missing_keys(host, stored)
    if missing and getattr(strict, "value", strict) not in _LENIENT:
        raise ValueError(_lacks(missing, str(checkpoint_dir)))
    _announce(len(requested) - len(host), len(host), checkpoint_dir)


def _lacks(missing: list[str], source: str) -> str:
    heading = (
        f"{source} is of a plain model and lacks parameters that are not the residual's, so they "
        "would start from random values"
    )
    advice = "Give the model the options that the checkpoint was trained with"
    return f"{fault_list(heading, missing)}\n{advice}"


def _keep(value: Any) -> Any:
    """What is new, at the value that the model has already."""
    if isinstance(value, _SHARDED) and _is_new(value.key):
        return LocalNonpersistentObject(value.data)
    return value


def _announce(num_new: int, num_host: int, source: Any) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"megatron_residuals: starts from the plain model in {source}: {num_host} tensors of "
            f"the host are read, {num_new} of the residual keep their initial values (on rank 0)",
            flush=True,
        )
