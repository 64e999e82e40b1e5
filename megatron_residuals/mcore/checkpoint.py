# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a residual in checkpoints: written with the weights, compared before they load.

with ``torch_dist``   a sharded object beside the parameters, read ahead of everything else
with ``torch``        an entry of the state dict, compared when the dict is loaded
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.arguments import CONVERT_BLOCK_LENGTH, global_args
from megatron_residuals.settings import (
    BLOCK_LENGTH,
    RECORD,
    Setting,
    compare_settings,
    settings_of,
)

ENTRY = f"{RECORD}._extra_state"
"""The end of the record's key in any state dict."""

_conversion: ContextVar[bool] = ContextVar("block length conversion", default=False)


@contextlib.contextmanager
def convert_block_length() -> Iterator[None]:
    """Inside, AttnRes weights load into blocks of another length than they were trained with.

    Every sublayer has its query and key gain whatever the length, so all of them are taken over
    bit for bit; what they attend to is another set of sums, so the loss changes and training has to
    recover. In a training run the flag ``--residual-convert-block-length`` does the same.
    """
    token = _conversion.set(True)
    try:
        yield
    finally:
        _conversion.reset(token)


class SettingsRecord(MegatronModule):
    """A child of the block without parameters, whose extra state is the record.

    Args:
        config: the host's ``TransformerConfig``.
        settings: the record of the model (``settings.settings_of``).
        pp_rank: pipeline rank; the first one writes the record, all of them read it.
    """

    def __init__(self, config: Any, settings: Mapping[str, Setting], pp_rank: int) -> None:
        super().__init__(config)
        self.settings = dict(settings)
        self.pp_rank = pp_rank

    def get_extra_state(self) -> dict[str, Setting]:
        """The record."""
        return dict(self.settings)

    def set_extra_state(self, state: Mapping[str, Setting]) -> None:
        """Compare the record of a checkpoint with this model.

        Raises:
            ValueError: naming every setting that differs.
        """
        check_settings(state, self.settings)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *_: Any, **__: Any
    ) -> None:
        saved = state_dict.get(f"{prefix}_extra_state")
        if saved is not None:
            self.set_extra_state(saved)
            return
        # Without a record there are no weights of a mechanism either. In library use a strict load
        # says so; Megatron's training loop goes on after a strict load that failed.
        args = global_args()
        if args is not None and not args.finetune:
            check_settings(None, self.settings)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The host's, with one writer among the pipeline ranks."""
        entries: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for entry in entries.values():
            entry.replica_id = (self.pp_rank, *entry.replica_id[1:])
        return entries


def record_for(
    residual: ResidualConfig, config: Any, pp_rank: int, chunk: int
) -> SettingsRecord | None:
    """The record of a block; None for the plain residual, whose checkpoints are stock ones.

    One chunk of a rank has it: the host gives each rank one copy of an object.
    """
    if residual.mechanism == "residual" or chunk > 0:
        return None
    return SettingsRecord(config, settings_of(residual, config.num_layers), pp_rank)


def check_settings(saved: Mapping[str, Setting] | None, given: Mapping[str, Setting]) -> None:
    """Refuse weights that were saved under other settings than a model's.

    Raises:
        ValueError: naming every setting that differs, both values and what to do.
    """
    convert = _conversion.get() or getattr(global_args(), CONVERT_BLOCK_LENGTH, False)
    faults = compare_settings(saved, given, convert_block_length=convert)
    if faults:
        raise ValueError(
            "the checkpoint does not fit this model's residual:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )


def read_settings(directory: str | Path, key: str | None = None) -> dict[str, Setting] | None:
    """The record of a ``torch_dist`` checkpoint, read without ranks.

    Args:
        directory: the folder of one iteration (``…/iter_0001000``).
        key: the record of which model, where the checkpoint holds several.

    Returns:
        The record, or None if the checkpoint has none: its model has the stock residual.
    """
    storage = FileSystemReader(str(directory)).read_metadata().storage_data
    for index, place in storage.items():
        name = index.fqn.partition("/")[0]
        if name.endswith(ENTRY) and key in (None, name):
            with Path(directory, place.relative_path).open("rb") as file:
                file.seek(place.offset)
                (record,) = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
            return dict(record)
    return None


def checked_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load`` that compares the records before it loads anything.

    A request without a record, that is, of a model with its stock residual, passes unchanged; so
    does a directory that is not a local folder, whose record is compared after loading.
    """

    @functools.wraps(stock)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        for holder, name in list(_records(sharded_state_dict)):
            record = holder[name]
            if Path(checkpoint_dir, ".metadata").is_file():
                saved = read_settings(checkpoint_dir, record.key)
                check_settings(saved, record.data)
                _announce_conversion(saved, record.data)
        return stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load


def _records(request: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """The dict and the key of every record in a nested sharded state dict."""
    if isinstance(request, dict):
        for key, value in request.items():
            if isinstance(value, ShardedObject) and value.key.endswith(ENTRY):
                yield request, key
            else:
                yield from _records(value)
    elif isinstance(request, list):
        for value in request:
            yield from _records(value)


def _announce_conversion(saved: Mapping[str, Setting] | None, given: Mapping[str, Setting]) -> None:
    before, after = (saved or given).get(BLOCK_LENGTH), given.get(BLOCK_LENGTH)
    if before != after and (not dist.is_initialized() or dist.get_rank() == 0):
        print(
            f"megatron_residuals: AttnRes blocks of {before} sublayers become blocks of {after}; "
            "all weights are taken over",
            flush=True,
        )
