# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in one file: torch's ``.pt`` (Megatron's ``torch`` format too), safetensors."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.files import json_object
from megatron_residuals.interchange import pickles, tensor_file
from megatron_residuals.interchange.pickles import Trust
from megatron_residuals.settings import RECORD, Setting, as_record

RECORD_KEY = f"decoder.{RECORD}._extra_state"
LEGACY_FILE = "model_optim_rng.pt"
_MODEL_ENTRIES = ("model", "state_dict")


class TorchFile:
    """A pickled state dict, alone or as an entry of a larger dict.

    Raises:
        ValueError: the file is damaged, holds none, or asks for more than is trusted.
    """

    kind = "torch"

    def __init__(self, path: Path, trust: Trust) -> None:
        self.path = path
        self._content = pickles.load(path, trust, name=path, mmap=zipfile.is_zipfile(path))
        self._model = self._find_model()
        if not all(isinstance(key, str) for key in self._model):
            raise ValueError(f"{path} holds a dict whose keys are no names of parameters")

    def _find_model(self) -> dict[str, Any]:
        content = self._content
        if isinstance(content, dict):
            for entry in _MODEL_ENTRIES:
                model = content.get(entry)
                if isinstance(model, dict):
                    return model
            if "model0" in content:
                raise ValueError(
                    f"{self.path} holds the virtual stages of one pipeline rank; convert a "
                    "torch_dist checkpoint instead"
                )
            if any(isinstance(value, Tensor) for value in content.values()):
                return content
        raise ValueError(f"{self.path} holds no state dict of a model")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{key: shape} of every tensor of the model."""
        return {k: tuple(v.shape) for k, v in self._model.items() if isinstance(v, Tensor)}

    def settings(self) -> dict[str, Setting] | None:
        """The record of the residual; None if there is none."""
        found = [v for k, v in self._model.items() if k.endswith(RECORD_KEY)]
        return as_record(found[0], self.path) if found else None

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose key is wanted."""
        return {k: v for k, v in self.pieces() if wanted(k)}

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of the run that saved it; None if it has none."""
        args = self._content.get("args") if self._model is not self._content else None
        return vars(args) if isinstance(args, argparse.Namespace) else None

    def part(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What lies at an index of the first axes of one tensor."""
        tensor: Tensor = self._model[key][index]
        return tensor

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, read from the disk when it is looked at."""
        return ((k, v) for k, v in self._model.items() if isinstance(v, Tensor))

    def left_out(self) -> str | None:
        """What a new checkpoint does not get."""
        if self._model is self._content or "optimizer" not in self._content:
            return None
        return "the optimizer's state: it has none for the new parameters"

    def write_with(
        self,
        target: Path,
        added: Mapping[str, Tensor],
        record: Mapping[str, Setting],
        arguments: Mapping[str, Any],
    ) -> None:
        """Write the file ``target`` with tensors added, a record, and changed arguments."""
        record_key = next((k for k in self._model if k.endswith(RECORD_KEY)), RECORD_KEY)
        model: dict[str, Any] = {**self._model, **added, record_key: dict(record)}
        content = model
        if self._model is not self._content:
            entry = next(e for e in _MODEL_ENTRIES if self._content.get(e) is self._model)
            content = {**self._content, entry: model}
            content.pop("optimizer", None)
            if isinstance(args := content.get("args"), argparse.Namespace):
                content["args"] = argparse.Namespace(**{**vars(args), **arguments})
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, target)


class SafetensorsFile:
    """A flat file of tensors under Megatron's keys."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = tensor_file.read_metadata(path)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{key: shape} of every tensor."""
        return tensor_file.read_shapes(self.path)

    def settings(self) -> dict[str, Setting] | None:
        """The record of the residual; None if there is none."""
        text = self._metadata.get(RECORD)
        return None if text is None else as_record(json_object(text, self.path), self.path)

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose key is wanted."""
        return tensor_file.read_tensors(self.path, wanted)

    def arguments(self) -> dict[str, Any] | None:
        """None: such a file has only the model."""
        return None

    def part(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What lies at an index of the first axes of one tensor."""
        return self.read(key.__eq__)[key][index]

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one in memory at a time."""
        return tensor_file.each_tensor(self.path)

    def left_out(self) -> str | None:
        """Nothing: such a file has only the model."""
        return None

    def write_with(
        self,
        target: Path,
        added: Mapping[str, Tensor],
        record: Mapping[str, Setting],
        arguments: Mapping[str, Any],
    ) -> None:
        """Write the file ``target`` with tensors added and a record."""
        metadata = {**self._metadata, RECORD: json.dumps(dict(record))}
        target.parent.mkdir(parents=True, exist_ok=True)
        tensor_file.write_tensors(target, {**self.read(bool), **added}, metadata)
