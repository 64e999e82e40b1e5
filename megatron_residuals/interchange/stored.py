# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Finding out what kind of checkpoint a path is, and where in a new one its parts go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_residuals.interchange import tensor_file, torch_dist
from megatron_residuals.interchange.single_file import LEGACY_FILE, SafetensorsFile, TorchFile
from megatron_residuals.interchange.torch_dist import TorchDistCheckpoint
from megatron_residuals.settings import Setting

TRACKER = "latest_checkpointed_iteration.txt"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


class Checkpoint(Protocol):
    """What the kinds of checkpoints have in common."""

    kind: str

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{key: shape} of every tensor of the model."""

    def settings(self) -> dict[str, Setting] | None:
        """The record of the residual; None if there is none."""

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """The tensors whose key is wanted."""

    def left_out(self) -> str | None:
        """What a new checkpoint does not get, and why."""

    def write_with(
        self,
        target: Path,
        added: Mapping[str, Tensor],
        record: Mapping[str, Setting],
        arguments: Mapping[str, Any],
    ) -> None:
        """Write a new checkpoint with tensors added, a record, and changed arguments."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint and the folders around it.

    inside is the path from what the user named to the checkpoint; tracker is the text of Megatron's
    file that names the newest iteration, if the user named the folder of all iterations.
    """

    path: Path
    checkpoint: Checkpoint
    inside: Path = Path()
    tracker: str | None = None

    def write_with(
        self,
        target: Path,
        added: Mapping[str, Tensor],
        record: Mapping[str, Setting],
        arguments: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint of the same kind, in the same folders, below ``target``.

        Raises:
            ValueError: the target exists.
        """
        refuse_existing(target)
        self.checkpoint.write_with(target / self.inside, added, record, arguments)
        if self.tracker is not None:
            (target / TRACKER).write_text(self.tracker, encoding="utf-8")


def refuse_existing(target: Path) -> None:
    """Nothing is ever overwritten.

    Raises:
        ValueError: the target exists.
    """
    if target.exists():
        raise ValueError(f"{target} exists; give another path, or remove it first")


def open_checkpoint(path: Path) -> Stored:
    """The checkpoint at a path: of all iterations the newest, of one iteration, or one file.

    Raises:
        ValueError: there is nothing, or nothing of a known kind.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_file():
        return Stored(path, _open_file(path))
    if (path / TRACKER).is_file():
        tracker = (path / TRACKER).read_text(encoding="utf-8").strip()
        folder = f"iter_{int(tracker):07d}" if tracker.isdecimal() else tracker
        checkpoint, inside = _open_folder(path / folder)
        return Stored(path, checkpoint, Path(folder) / inside, tracker)
    checkpoint, inside = _open_folder(path)
    return Stored(path, checkpoint, inside)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == tensor_file.SUFFIX:
        return SafetensorsFile(path)
    if path.suffix in _TORCH_SUFFIXES:
        return TorchFile(path)
    known = ", ".join((*_TORCH_SUFFIXES, tensor_file.SUFFIX))
    raise ValueError(f"{path} is of no known format; files end in {known}")


def _open_folder(folder: Path) -> tuple[Checkpoint, Path]:
    ranks = sorted(path.name for path in folder.glob("mp_rank_*"))
    if len(ranks) > 1:
        raise ValueError(
            f"{folder} is in the torch format, split over {len(ranks)} ranks; load it once with "
            "Megatron and save it with --ckpt-format torch_dist, or start from it with --finetune"
        )
    if ranks:
        inside = Path(ranks[0], LEGACY_FILE)
        return TorchFile(folder / inside), inside
    if (folder / torch_dist.METADATA).is_file():
        backend = _backend(folder)
        if backend != "torch_dist":
            raise ValueError(
                f"{folder} is in the {backend} format; only torch_dist, torch and safetensors are "
                "known. Load it once with Megatron and save it with --ckpt-format torch_dist"
            )
        return TorchDistCheckpoint(folder), Path()
    raise ValueError(
        f"{folder} is no checkpoint: it has neither {TRACKER}, nor {torch_dist.METADATA} of a "
        "torch_dist checkpoint, nor mp_rank_… of one in the torch format"
    )


def _backend(folder: Path) -> str:
    config = folder / "metadata.json"
    if not config.is_file():
        return "torch_dcp"
    return str(json.loads(config.read_text(encoding="utf-8")).get("sharded_backend", "unknown"))
