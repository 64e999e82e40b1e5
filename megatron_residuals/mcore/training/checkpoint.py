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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import CONVERT_BLOCK_LENGTH
from megatron_residuals.mcore.arguments import global_args
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.settings import (
    BLOCK_LENGTH,
    RECORD,
    Setting,
    as_record,
    compare_settings,
    settings_of,
)
from megatron_residuals.text import fault_list

ENTRY = f"{RECORD}._extra_state"
"""The end of the record's key in any state dict."""
PLAIN: Mapping[str, Setting] = {"mechanism": "residual"}
"""What the record of a plain model would be, stock or ours."""

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
    residual: ResidualConfig, layout: StageLayout, config: Any, pp_rank: int, chunk: int
) -> SettingsRecord | None:
    """The record of a block; None for the plain residual, whose checkpoints are stock ones.

    One chunk of a rank has it: the host gives each rank one copy of an object.
    """
    if residual.entry.is_stock or chunk > 0:
        return None
    settings = settings_of(residual, layout.num_layers, layout.sublayers_per_layer)
    return SettingsRecord(config, settings, pp_rank)


def check_settings(saved: Mapping[str, Setting] | None, given: Mapping[str, Setting]) -> None:
    """Refuse weights that were saved under other settings than a model's.

    Raises:
        ValueError: naming every setting that differs, both values and what to do.
    """
    convert = _conversion.get() or getattr(global_args(), CONVERT_BLOCK_LENGTH, False)
    faults = compare_settings(saved, given, convert_block_length=convert)
    if faults:
        raise ValueError(fault_list("the checkpoint does not fit this model's residual", faults))


def read_settings(directory: str | Path, key: str | None = None) -> dict[str, Setting] | None:
    """The record of a ``torch_dist`` checkpoint, read without ranks.

    Args:
        directory: the folder of one iteration (``…/iter_0001000``).
        key: the record of which model, where the checkpoint holds several.

    Returns:
        The record, or None if the checkpoint has none: its model has the stock residual.
    """
    records = _stored_records(directory, _metadata_of(directory))
    return next(iter(records.values()), None) if key is None else records.get(key)


def _metadata_of(directory: str | Path) -> Metadata:
    return FileSystemReader(str(directory)).read_metadata()


def _stored_records(directory: str | Path, metadata: Metadata) -> dict[str, dict[str, Setting]]:
    """Every record of a ``torch_dist`` checkpoint by its key, of which there is one a model.

    Raises:
        ValueError: the file of a record ends before it.
    """
    records = {}
    for index, place in metadata.storage_data.items():
        name = index.fqn.partition("/")[0]
        if name.endswith(ENTRY):
            path = Path(directory, place.relative_path)
            with path.open("rb") as file:
                file.seek(place.offset)
                stored = file.read(place.length)
            if len(stored) < place.length:
                raise ValueError(
                    f"{path} is cut off: .metadata names a record that ends at byte "
                    f"{place.offset + place.length}, the file has {path.stat().st_size}; load an "
                    "earlier iteration (--ckpt-step)"
                )
            (record,) = torch.load(io.BytesIO(stored), weights_only=True)
            records[name] = as_record(record, directory)
    return records


def checked_load(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load`` that compares the records before it loads anything.

    A model with the plain residual has none, and asks for the weights beside one in vain. Of a
    directory that is not a local folder the record is compared after loading.
    """

    @functools.wraps(stock)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(checkpoint_dir, ".metadata").is_file():
            wanted = [v for v in nested_values(sharded_state_dict) if isinstance(v, ShardedBase)]
            given: dict[str, Any] = {
                value.key: value.data for value in wanted if value.key.endswith(ENTRY)
            }
            metadata = _metadata_of(checkpoint_dir)
            saved = _stored_records(checkpoint_dir, metadata)
            _warn_of_other_padding(wanted, metadata)
            for key, settings in given.items():
                check_settings(saved.get(key), settings)
                _announce_conversion(saved.get(key), settings)
            for key in saved.keys() - given.keys():
                if any(value.key.startswith(key.removesuffix(ENTRY)) for value in wanted):
                    check_settings(saved[key], PLAIN)
        return stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load


def refuse_mechanism(_: Any, state_dict: Mapping[str, Any], prefix: str, *__: Any) -> None:
    """Hook in front of ``load_state_dict`` of a block with the plain residual.

    Raises:
        ValueError: the state dict is of a model with a mechanism.
    """
    if prefix + ENTRY in state_dict:
        check_settings(state_dict[prefix + ENTRY], PLAIN)


def _announce_conversion(saved: Mapping[str, Setting] | None, given: Mapping[str, Setting]) -> None:
    before, after = (saved or given).get(BLOCK_LENGTH), given.get(BLOCK_LENGTH)
    if before != after:
        _say(
            f"AttnRes blocks of {before} sublayers become blocks of {after}; all weights are taken "
            "over"
        )


def _warn_of_other_padding(wanted: Sequence[ShardedBase], metadata: Metadata) -> None:
    """Say that a vocabulary is padded to another number of rows, which the host loads in silence.

    The host pads it to a multiple of TP and ``--make-vocab-size-divisible-by``. Rows that the
    checkpoint lacks become zero, and all rows are in the denominator of the loss.
    """
    for tensor in wanted:
        stored = metadata.state_dict_metadata.get(tensor.key)
        if not isinstance(tensor, ShardedTensor) or not tensor.allow_shape_mismatch:
            continue
        if not isinstance(stored, TensorStorageMetadata) or "optimizer" in tensor.key:
            continue
        if stored.size[0] == tensor.global_shape[0]:
            continue
        before, after = stored.size[0], tensor.global_shape[0]
        tp = (tensor.axis_fragmentations or (1,))[0]
        advice = f"no padding keeps it with TP {tp}"
        if before % tp == 0:
            advice = f"--make-vocab-size-divisible-by {before // tp} keeps it"
        _say(
            f"warning: {tensor.key} has {before} rows in the checkpoint and {after} in this model, "
            "whose vocabulary is padded for another tensor-parallel size; rows of padding are part "
            f"of the softmax, so the loss is another: {advice}"
        )
        return


def _say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"megatron_residuals: {text}", flush=True)
