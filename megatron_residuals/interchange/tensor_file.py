# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""safetensors files, and folders of them: an optional dependency, imported where it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

SUFFIX = ".safetensors"


def _safetensors(name: str) -> Any:
    """A module of safetensors.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"safetensors files need the package safetensors ({error}); install it: "
            "pip install 'megatron-residuals[interchange]'"
        ) from error


def is_available() -> bool:
    """Whether safetensors is installed."""
    try:
        _safetensors("safetensors.torch")
    except RuntimeError:
        return False
    return True


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one file; ``metadata`` is text by name and goes into its header."""
    save_file = _safetensors("safetensors.torch").save_file
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt", **metadata})


def read_metadata(path: Path) -> dict[str, str]:
    """The text in the header of a file, or of the first one of a folder."""
    with _safetensors("safetensors").safe_open(_files(path)[0], framework="pt") as file:
        return dict(file.metadata() or {})


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a file, or of all files of a folder, without reading the tensors."""
    shapes = {}
    for file_path in _files(path):
        with _safetensors("safetensors").safe_open(file_path, framework="pt") as file:
            for name in file.keys():
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def read_tensors(path: Path, wanted: Callable[[str], bool] = bool) -> dict[str, Tensor]:
    """Tensors of a file, or of all files of a folder, whose name is wanted.

    Raises:
        ValueError: there is no such file.
    """
    tensors = {}
    for file_path in _files(path):
        with _safetensors("safetensors").safe_open(file_path, framework="pt") as file:
            for name in filter(wanted, file.keys()):
                tensors[name] = file.get_tensor(name)
    return tensors


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{path} is neither a {SUFFIX} file nor a folder of them")
    return files
