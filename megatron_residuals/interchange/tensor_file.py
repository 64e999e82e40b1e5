# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""safetensors files, and folders of them: an optional dependency, imported where it is used."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_residuals.files import naming
from megatron_residuals.text import reason

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


def require() -> None:
    """Raise RuntimeError, which says what to install, if safetensors is not installed."""
    _safetensors("safetensors.torch")


def is_available() -> bool:
    """Whether safetensors is installed."""
    try:
        require()
    except RuntimeError:
        return False
    return True


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one file; ``metadata`` is text by name and goes into its header.

    Raises:
        OSError: it cannot be written.
    """
    save_file = _safetensors("safetensors.torch").save_file
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt", **metadata})
    except _safetensors("safetensors").SafetensorError as error:
        raise OSError(reason(error)) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safe_open = _safetensors("safetensors").safe_open
    with naming(path), safe_open(path, framework="pt") as file:
        yield file


def read_metadata(path: Path) -> dict[str, str]:
    """The text in the header of a file, or of the first one of a folder."""
    with _opened(_files(path)[0]) as file:
        return dict(file.metadata() or {})


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a file, or of all files of a folder, without reading the tensors."""
    shapes = {}
    for file_path in _files(path):
        with _opened(file_path) as file:
            for name in file.keys():
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def each_tensor(path: Path, wanted: Callable[[str], bool] = bool) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of a file, or of all files of a folder, one at a time.

    Raises:
        ValueError: there is no such file, or it is damaged.
    """
    for file_path in _files(path):
        with _opened(file_path) as file:
            for name in filter(wanted, file.keys()):
                yield name, file.get_tensor(name)


def read_tensors(path: Path, wanted: Callable[[str], bool] = bool) -> dict[str, Tensor]:
    """Tensors of a file, or of all files of a folder, whose name is wanted.

    Raises:
        ValueError: there is no such file, or it is damaged.
    """
    return dict(each_tensor(path, wanted))


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{path} is neither a {SUFFIX} file nor a folder of them")
    return files
