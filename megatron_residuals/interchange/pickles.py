# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pickles of checkpoints: plain data is read, anything else only from files that are trusted.

A pickle names classes and functions and calls them as it is read, which can run any code. Known
classes that do no harm are let through; a file that asks for others needs ``Trust(True)``.
"""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import pickle
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_residuals.files import naming

PLAIN_CLASSES = (argparse.Namespace, types.SimpleNamespace, io.BytesIO, pathlib.PosixPath)
_ASKED_FOR = re.compile(r"GLOBAL (\S+)")  # in errors of torch's, and in ours
_HOST = "megatron.core.dist_checkpointing.strategies.torch"
_INDEX_NAMES: dict[tuple[str, str], Any] = {
    (_HOST, "MCoreMetadata"): metadata.Metadata,  # of hosts to 0.15, with attributes more
    (_HOST, "MCoreSavePlan"): planner.SavePlan,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
} | {
    (each.__module__, each.__name__): each
    for each in (
        collections.OrderedDict,
        torch.Size,
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        planner.SavePlan,  # the plans of all ranks, which hosts leave in the index
        planner.WriteItem,
        planner.WriteItemType,
        planner.TensorWriteData,
        *([planner.BytesIOWriteData] if hasattr(planner, "BytesIOWriteData") else []),  # not in 2.6
    )
}


@dataclass(frozen=True)
class Trust:
    """What may be unpickled.

    Attributes:
        everything: whatever a file asks for, which runs any code that it brings.
        more_classes: gives classes besides ``PLAIN_CLASSES``; called when a file asks for others.
    """

    everything: bool = False
    more_classes: Callable[[], Sequence[Callable[..., object]]] = tuple


PLAIN_DATA = Trust()


def load(file: Path | io.BytesIO, trust: Trust, *, name: Path, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, on the CPU; as plain data first.

    Args:
        name: the file that errors name.
        mmap: leave tensors on disk until they are looked at.

    Raises:
        ValueError: the file is damaged, or asks for more than is trusted.
    """

    def attempt(weights_only: bool, *classes: Callable[..., object]) -> Any:
        if isinstance(file, io.BytesIO):
            file.seek(0)
        with torch.serialization.safe_globals([*PLAIN_CLASSES, *classes]):
            return torch.load(file, map_location="cpu", mmap=mmap, weights_only=weights_only)

    with naming(name):
        try:
            return attempt(True)
        except pickle.UnpicklingError as error:
            refused = error
        if _ASKED_FOR.search(str(refused)) is not None:
            try:
                return attempt(True, *trust.more_classes())
            except pickle.UnpicklingError as error:
                refused = error
        if trust.everything:
            return attempt(False)
    raise _refusal(name, refused)


def load_index(path: Path, trust: Trust) -> Metadata:
    """The index of a ``torch_dist`` checkpoint, its file ``.metadata``.

    Raises:
        ValueError: the file is damaged, or asks for more than is trusted.
    """
    index, refused = None, None
    with naming(path), path.open("rb") as file:
        try:
            index = _IndexUnpickler(file, trust).load()
        except pickle.UnpicklingError as error:
            refused = error
    if not isinstance(index, Metadata):
        raise _refusal(path, refused)
    return index


def _refusal(path: Path, error: pickle.UnpicklingError | None) -> ValueError:
    asked = _ASKED_FOR.search(str(error))
    if asked is None:
        return ValueError(f"{path} cannot be read; it is damaged, or of another format")
    return ValueError(
        f"{path} holds more than plain data ({asked[1]}), and reading that can run any code; if "
        "you trust where it comes from, give --trust-input"
    )


class _IndexUnpickler(pickle.Unpickler):
    """Finds the classes of an index; others only in files that are trusted."""

    def __init__(self, file: BinaryIO, trust: Trust) -> None:
        super().__init__(file)
        self._trust = trust

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_NAMES:
            return _INDEX_NAMES[module, name]
        dtype = getattr(torch, name, None)
        if module == "torch" and isinstance(dtype, torch.dtype):
            return dtype
        if self._trust.everything:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
