# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``torch_dist`` checkpoints read and extended without ranks.

A folder of one iteration holds data files and an index, ``.metadata``, that says where in them each
tensor and object lies. A new checkpoint gets the kept ranges as they are, byte by byte, and the
added tensors in a file of their own; the optimizer's state, most of the bytes, stays behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_residuals.interchange.names import is_model_key
from megatron_residuals.settings import RECORD, Setting

METADATA, COMMON_FILE, INTEGRITY_FILE = ".metadata", "common.pt", "integrity.json"
COMMON_ENTRY = "common_state/shard_0_1"  # where newer hosts keep what COMMON_FILE held
RECORD_ENTRY = f"decoder.{RECORD}._extra_state/shard_0_1"
ADDED = "__residual"
_COPY_BYTES = 2**24
# torch 2.6 has no such option: it works alone where there is no process group, as in commands.
_ALONE = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}


class TorchDistCheckpoint:
    """The folder of one iteration (``…/iter_0001000``)."""

    kind = "torch_dist"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata: Metadata = _quiet(FileSystemReader(folder).read_metadata)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{key: shape} of every tensor of the model."""
        return {
            key: tuple(entry.size)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and is_model_key(key)
        }

    def settings(self) -> dict[str, Setting] | None:
        """The record of the residual; None if there is none."""
        if RECORD_ENTRY not in self._metadata.state_dict_metadata:
            return None
        (record,) = self._object(RECORD_ENTRY, weights_only=True)
        return dict(record)

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose key is wanted, whole."""
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and is_model_key(key) and wanted(key)
        }
        _quiet(load, tensors, storage_reader=FileSystemReader(self.folder), **_ALONE)
        return tensors

    def left_out(self) -> str | None:
        """What a new checkpoint does not get."""
        if all(map(is_model_key, self._metadata.state_dict_metadata)):
            return None
        return "the optimizer's state: it has none for the new parameters"

    def write_with(
        self,
        target: Path,
        added: Mapping[str, Tensor],
        record: Mapping[str, Setting],
        arguments: Mapping[str, Any],
    ) -> None:
        """Write the folder ``target`` with tensors added, a record, and changed arguments."""
        target.mkdir(parents=True)
        keep = dataclasses.replace(self._metadata)
        objects: dict[str, Any] = {**added, RECORD_ENTRY: [dict(record)]}
        for path in self.folder.iterdir():
            if path.suffix != ".distcp" and path.name not in (METADATA, INTEGRITY_FILE):
                shutil.copy2(path, target / path.name)
        if (self.folder / COMMON_FILE).is_file():
            common = torch.load(self.folder / COMMON_FILE, map_location="cpu", weights_only=False)
            torch.save(_with_arguments(common, arguments), target / COMMON_FILE)
        elif COMMON_ENTRY in keep.state_dict_metadata:
            (common,) = self._object(COMMON_ENTRY, weights_only=False)
            if common.get("args") is not None:
                objects[COMMON_ENTRY] = [_with_arguments(common, arguments)]
        replaced = objects.keys() & keep.state_dict_metadata.keys()

        def is_kept(key: str) -> bool:
            return is_model_key(key) and key not in replaced

        keep.state_dict_metadata = {k: v for k, v in keep.state_dict_metadata.items() if is_kept(k)}
        keep.storage_data = self._copy_ranges(target, is_kept)
        _add(target, keep, objects)
        with (target / METADATA).open("wb") as file:
            pickle.dump(keep, file)

    def _copy_ranges(self, target: Path, is_kept: Callable[[str], bool]) -> dict[Any, Any]:
        """Copy the bytes of what is kept, file by file; returns where each item is now."""
        by_file: dict[str, list[Any]] = {}
        for index, place in self._metadata.storage_data.items():
            if is_kept(index.fqn):
                by_file.setdefault(place.relative_path, []).append((place.offset, index, place))
        moved = {}
        for name, items in by_file.items():
            items.sort(key=lambda item: item[0])
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("rb") as source, (target / name).open("wb") as copy:
                for offset, index, place in items:
                    moved[index] = dataclasses.replace(place, offset=copy.tell())
                    source.seek(offset)
                    _copy(source, copy, place.length)
        return moved

    def _object(self, key: str, *, weights_only: bool) -> Any:
        (place,) = [p for i, p in self._metadata.storage_data.items() if i.fqn == key]
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        return torch.load(data, map_location="cpu", weights_only=weights_only)


def _copy(source: Any, target: Any, length: int) -> None:
    while length > 0:
        block = source.read(min(length, _COPY_BYTES))
        if not block:
            raise ValueError("a data file ends before its index says; the checkpoint is damaged")
        target.write(block)
        length -= len(block)


def _add(target: Path, metadata: Metadata, objects: Mapping[str, Any]) -> None:
    """Write objects into a file of their own and enter them into the index."""
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        planner = DefaultSavePlanner(flatten_state_dict=False)  # an object is one entry
        _quiet(save, dict(objects), checkpoint_id=scratch, planner=planner, **_ALONE)
        new = _quiet(FileSystemReader(scratch).read_metadata)
        files = sorted({place.relative_path for place in new.storage_data.values()})
        names = {name: f"{ADDED}_{number}.distcp" for number, name in enumerate(files)}
        for name, renamed in names.items():
            shutil.move(Path(scratch, name), target / renamed)
    metadata.state_dict_metadata |= new.state_dict_metadata
    for index, place in new.storage_data.items():
        moved = dataclasses.replace(place, relative_path=names[place.relative_path])
        metadata.storage_data[index] = moved


def _with_arguments(common: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Common state whose ``args`` say what the new checkpoint is.

    ``no_save_optim`` is how the host's checkpoints say that they hold no optimizer state.
    """
    args = common.get("args")
    if args is not None:
        for name, value in {**arguments, "no_save_optim": True}.items():
            setattr(args, name, value)
    return common


def _quiet(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch warns that it assumes one process, which is what is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)
