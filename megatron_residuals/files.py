# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files read and written so that a fault names the file and leaves nothing half done.

Depends on the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_residuals.text import reason


@contextlib.contextmanager
def naming(path: Path, fault: str = "cannot be read") -> Iterator[None]:
    """Around a library's look at a file: what it raises over damaged ones may be anything.

    Raises:
        ValueError: whatever was raised, in one line that names the file.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} {fault} ({reason(error)})") from error


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it cannot be read, or is not UTF-8.
    """
    with naming(path):
        return path.read_text(encoding="utf-8")


def json_object(text: str, path: Path) -> dict[str, object]:
    """The JSON object that a text of a file is.

    Raises:
        ValueError: it is none; names the file.
    """
    with naming(path, "is not JSON"):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__} in place of an object")
    return found


def refuse_existing(target: Path) -> None:
    """Nothing is ever overwritten.

    Raises:
        ValueError: the target exists.
    """
    if target.exists():
        raise ValueError(f"{target} exists; give another path, or remove it first")


@contextlib.contextmanager
def written_beside(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A path for a file or a folder that becomes ``target`` when all of it is written.

    It lies in a scratch folder beside the target. A failure takes that away, so that nothing half
    written stands in the way of the next try. ``replace``: what is there goes when all is written.

    Raises:
        ValueError: the target exists, or cannot be written.
    """
    if not replace:
        refuse_existing(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as scratch:
            path = Path(scratch, target.name)
            yield path
            if replace and target.exists():
                target.rename(Path(scratch, "replaced"))
            refuse_existing(target)
            path.rename(target)
    except (OSError, RuntimeError) as error:  # torch has the latter for a disk that is full
        raise ValueError(f"{target} cannot be written ({reason(error)})") from error
