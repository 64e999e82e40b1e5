# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""``torch_dist`` checkpoints read and extended without ranks.

A folder of one iteration holds data files and an index, ``.metadata``, that says where in them each
tensor and object lies. A new checkpoint gets the kept ranges as they are, byte by byte, and the
added tensors in a file of their own; the optimizer's state, most of the bytes, stays behind.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import inspect
import io
import itertools
import math
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_residuals.files import naming
from megatron_residuals.interchange import pickles
from megatron_residuals.interchange.names import is_model_key
from megatron_residuals.interchange.pickles import PLAIN_DATA, Trust
from megatron_residuals.settings import RECORD, Setting, as_record
from megatron_residuals.text import first_few, raise_faults

METADATA, COMMON_FILE, INTEGRITY_FILE = ".metadata", "common.pt", "integrity.json"
COMMON_ENTRY = "common_state/shard_0_1"  # where newer hosts keep what COMMON_FILE held
RECORD_ENTRY = f"decoder.{RECORD}._extra_state/shard_0_1"
SUFFIX = ".distcp"
ADDED = "__residual"
_COPY_BYTES = 2**24
# torch 2.6 has no such option: it works alone where there is no process group, as in commands.
_ALONE = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}


class TorchDistCheckpoint:
    """The folder of one iteration (``…/iter_0001000``).

    Raises:
        ValueError: its index is damaged, or says what cannot be.
    """

    kind = "torch_dist"

    def __init__(self, folder: Path, trust: Trust) -> None:
        self.folder = folder
        self._trust = trust
        self._index = pickles.load_index(folder / METADATA, trust)
        with naming(folder / METADATA, "is damaged"):
            faults = list(_index_faults(folder, self._index))
            self._tensors = _tensors_of(self._index)
        raise_faults(str(folder), first_few(faults))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{key: shape} of every tensor of the model."""
        return {key: tuple(entry.size) for key, entry in self._tensors.items()}

    def settings(self) -> dict[str, Setting] | None:
        """The record of the residual; None if there is none."""
        if RECORD_ENTRY not in self._index.state_dict_metadata:
            return None
        return as_record(self._object(RECORD_ENTRY, PLAIN_DATA), self.folder)

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose key is wanted, whole."""
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            for key, entry in self._tensors.items()
            if wanted(key)
        }
        with naming(self.folder):
            reader = _IndexedReader(self.folder, self._index)
            _quiet(load, tensors, storage_reader=reader, **_ALONE)
        return tensors

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of the run that saved it; None if it has none."""
        args = self._common().get("args")
        return vars(args) if isinstance(args, argparse.Namespace) else None

    def part(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What lies at an index of the first axes of one tensor, from the chunks that have it."""
        entry, depth = self._tensors[key], len(index)
        found = torch.empty(entry.size[depth:], dtype=entry.properties.dtype)
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        numbers = 0
        for offsets, place in self._chunks[key]:
            size = sizes[offsets]
            inner = tuple(i - start for i, start in zip(index, offsets, strict=False))
            if not all(0 <= i < length for i, length in zip(inner, size, strict=False)):
                continue
            chunk = self._load(place.relative_path, place.offset, place.length, PLAIN_DATA)
            where = zip(offsets[depth:], size[depth:], strict=True)
            piece = chunk.view(size)[inner]
            found[tuple(slice(start, start + length) for start, length in where)] = piece
            numbers += piece.numel()
        if numbers != found.numel():
            raise ValueError(f"{self.folder / METADATA} is damaged: {key} is not whole")
        return found

    @functools.cached_property
    def _chunks(self) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
        """Offsets and place of every chunk, by key."""
        chunks: dict[str, list[tuple[tuple[int, ...], Any]]] = {key: [] for key in self._tensors}
        for item, place in self._index.storage_data.items():
            if item.fqn in chunks:
                chunks[item.fqn].append((tuple(item.offset or ()), place))
        return chunks

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model as the pieces that ranks wrote, one in memory at a time."""
        places = [
            (place.relative_path, place.offset, place.length, item.fqn)
            for item, place in self._index.storage_data.items()
            if item.fqn in self._tensors
        ]
        for name, offset, length, key in sorted(places):
            yield key, self._load(name, offset, length, PLAIN_DATA)

    def left_out(self) -> str | None:
        """What a new checkpoint does not get."""
        if all(map(is_model_key, self._index.state_dict_metadata)):
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
        common = _with_arguments(self._common(), arguments)
        target.mkdir(parents=True)
        objects: dict[str, Any] = {**added, RECORD_ENTRY: [dict(record)]}
        self._copy_other_files(target)
        if (self.folder / COMMON_FILE).is_file():
            torch.save(common, target / COMMON_FILE)
        elif common.get("args") is not None:
            objects[COMMON_ENTRY] = [common]
        keep = dataclasses.replace(self._index)
        replaced = objects.keys() & keep.state_dict_metadata.keys()

        def is_kept(key: str) -> bool:
            return is_model_key(key) and key not in replaced

        keep.state_dict_metadata = {k: v for k, v in keep.state_dict_metadata.items() if is_kept(k)}
        keep.storage_data = self._copy_ranges(target, is_kept)
        _add(target, keep, objects)
        with (target / METADATA).open("wb") as file:
            pickle.dump(keep, file)

    def _common(self) -> dict[str, Any]:
        """What the host saved once for all ranks, its arguments among it; empty if it did not."""
        path = self.folder / COMMON_FILE
        common: Any = {}
        if path.is_file():
            common = pickles.load(path, self._trust, name=path)
        elif COMMON_ENTRY in self._index.state_dict_metadata:
            common = self._object(COMMON_ENTRY, self._trust)
        if not isinstance(common, dict):
            raise ValueError(f"{path} holds a {type(common).__name__} in place of the common state")
        return common

    def _copy_other_files(self, target: Path) -> None:
        """What is not data of the index; other libraries put folders of their own here."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.copytree(path, target / path.name)
            elif path.suffix != SUFFIX and path.name not in (METADATA, INTEGRITY_FILE):
                shutil.copy2(path, target / path.name)

    def _copy_ranges(self, target: Path, is_kept: Callable[[str], bool]) -> dict[Any, Any]:
        """Copy the bytes of what is kept, file by file; returns where each item is now."""
        by_file: dict[str, list[Any]] = {}
        for index, place in self._index.storage_data.items():
            if is_kept(index.fqn):
                by_file.setdefault(place.relative_path, []).append((place.offset, index, place))
        moved = {}
        for name, items in by_file.items():
            items.sort(key=lambda item: item[0])
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("rb") as source, (target / name).open("wb") as file:
                for offset, index, place in items:
                    moved[index] = dataclasses.replace(place, offset=file.tell())
                    source.seek(offset)
                    _copy(source, file, place.length)
        return moved

    def _object(self, key: str, trust: Trust) -> Any:
        """An object of the host's, which saves each as a list of one."""
        places = [place for item, place in self._index.storage_data.items() if item.fqn == key]
        if len(places) == 1:
            (place,) = places
            found = self._load(place.relative_path, place.offset, place.length, trust)
            if isinstance(found, list) and len(found) == 1:
                return found[0]
        raise ValueError(f"{self.folder / METADATA} is damaged: {key} is not one object")

    def _load(self, name: str, offset: int, length: int, trust: Trust) -> Any:
        path = self.folder / name
        with naming(path), path.open("rb") as file:
            file.seek(offset)
            data = io.BytesIO(file.read(length))
        return pickles.load(data, trust, name=path)


class _IndexedReader(FileSystemReader):
    """Reads by an index that was checked; torch's own reader would unpickle the file anew."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def _tensors_of(index: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        key: entry
        for key, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and is_model_key(key)
    }


def _index_faults(folder: Path, index: Metadata) -> Iterator[str]:
    """What an index says of the model's data that cannot be.

    Nothing may lie outside the folder or behind the end of a file, and no tensor may have more
    bytes than there are: its shape says how much memory is taken for it.
    """
    places = [(i.fqn, p) for i, p in index.storage_data.items() if is_model_key(i.fqn)]
    for name in sorted({place.relative_path for _, place in places}):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.suffix != SUFFIX:
            yield f"{METADATA} names {name!r} as a data file, which is none of this folder."
            return
    stored: collections.Counter[str] = collections.Counter()
    ends: collections.Counter[str] = collections.Counter()
    for key, place in places:
        if place.offset < 0 or place.length < 0:
            yield f"{METADATA} has {key} in front of a file; it is damaged."
            return
        stored[key] += place.length
        ends[place.relative_path] = max(ends[place.relative_path], place.offset + place.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size < end:
            yield f"{name} has {size:,} bytes of {end:,}; it is cut short or missing."
    for key, entry in _tensors_of(index).items():
        needed = math.prod(entry.size) * entry.properties.dtype.itemsize
        if stored[key] < needed:
            yield f"{key} has {stored[key]:,} bytes, and its shape {list(entry.size)} takes more."


def _copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    while length > 0:
        block = source.read(min(length, _COPY_BYTES))
        if not block:
            raise ValueError(f"{source.name} ends before its index says; it is damaged")
        target.write(block)
        length -= len(block)


def _add(target: Path, metadata: Metadata, objects: Mapping[str, Any]) -> None:
    """Write objects into a file of their own and enter them into the index."""
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        planner = DefaultSavePlanner(flatten_state_dict=False)  # an object is one entry
        _quiet(save, dict(objects), checkpoint_id=scratch, planner=planner, **_ALONE)
        new = _quiet(FileSystemReader(scratch).read_metadata)
        files = sorted({place.relative_path for place in new.storage_data.values()})
        # what was converted before has files of such names
        numbered = (f"{ADDED}_{number}{SUFFIX}" for number in itertools.count())
        free = (name for name in numbered if not (target / name).exists())
        names = dict(zip(files, free, strict=False))
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
    if not isinstance(args, argparse.Namespace):
        return common
    changed = argparse.Namespace(**{**vars(args), **arguments, "no_save_optim": True})
    return {**common, "args": changed}


def _quiet(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch warns that it assumes one process, which is meant, and hides errors from ``except``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(*args, **kwargs)
        except CheckpointException as error:  # no Exception
            (cause, _), *_ = error.failures.values()
            raise cause from error
