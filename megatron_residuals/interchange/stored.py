# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Finding out what kind of checkpoint a path is, and where in a new one its parts go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_residuals.files import json_object, read_text, written_beside
from megatron_residuals.interchange import tensor_file, torch_dist
from megatron_residuals.interchange.pickles import PLAIN_DATA, Trust
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

    def arguments(self) -> dict[str, Any] | None:
        """The arguments of the run that saved it; None if it has none."""

    def part(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What lies at an index of the first axes of one tensor; () is all of it."""

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Key and a part of every tensor of the model; big models do not fit into memory."""

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
            ValueError: the target exists, lies inside this checkpoint, or cannot be written.
        """
        self.refuse_inside(target)
        with written_beside(target) as path:
            self.checkpoint.write_with(path / self.inside, added, record, arguments)
            if self.tracker is not None:
                (path / TRACKER).write_text(self.tracker, encoding="utf-8")

    def refuse_inside(self, target: Path) -> None:
        """A checkpoint stays as it is: nothing is written into its folder.

        Raises:
            ValueError: the target lies there.
        """
        if target.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{target} lies inside {self.path}; give a path outside of it")


def not_finite(pieces: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of tensors with NaN or infinite values among those given, whole or in pieces."""
    names: dict[str, None] = {}
    for name, piece in pieces:
        wide = piece.float() if piece.element_size() == 1 else piece  # torch has no test of float8
        if not wide.isfinite().all():
            names[name] = None
    return list(names)


def open_checkpoint(path: Path, trust: Trust = PLAIN_DATA) -> Stored:
    """The checkpoint at a path: of all iterations the newest, of one iteration, or one file.

    Args:
        trust: what may be unpickled besides plain data.

    Raises:
        ValueError: there is nothing, nothing of a known kind, or it is damaged.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_file():
        return Stored(path, _open_file(path, trust))
    if not (path / TRACKER).is_file():
        checkpoint, inside = _open_folder(path, trust)
        return Stored(path, checkpoint, inside)
    tracker = read_text(path / TRACKER).strip()
    folder = _newest(path, tracker)
    checkpoint, inside = _open_folder(path / folder, trust)
    return Stored(path, checkpoint, folder / inside, tracker)


def _newest(path: Path, tracker: str) -> Path:
    """The folder that a tracker names: no text but these two kinds may become a path."""
    if re.fullmatch(r"[0-9]{1,18}|release", tracker) is None:
        raise ValueError(
            f"{path / TRACKER} says {tracker[:40]!r}; it may hold a number of iterations, or the "
            "word release"
        )
    folder = Path(tracker if tracker == "release" else f"iter_{int(tracker):07d}")
    if not (path / folder).is_dir():
        raise ValueError(f"{path / TRACKER} names {folder}, and there is no such folder")
    return folder


def _open_file(path: Path, trust: Trust) -> Checkpoint:
    if path.suffix == tensor_file.SUFFIX:
        return SafetensorsFile(path)
    if path.suffix in _TORCH_SUFFIXES:
        return TorchFile(path, trust)
    known = ", ".join((*_TORCH_SUFFIXES, tensor_file.SUFFIX))
    raise ValueError(f"{path} is of no known format; files end in {known}")


def _open_folder(folder: Path, trust: Trust) -> tuple[Checkpoint, Path]:
    ranks = sorted(path.name for path in folder.glob("mp_rank_*"))
    if len(ranks) > 1:
        raise ValueError(
            f"{folder} is in the torch format, split over {len(ranks)} ranks; load it once with "
            "Megatron and save it with --ckpt-format torch_dist, or start from it with --finetune"
        )
    if ranks:
        inside = Path(ranks[0], LEGACY_FILE)
        return TorchFile(folder / inside, trust), inside
    if (folder / torch_dist.METADATA).is_file():
        backend = _backend(folder)
        if backend != "torch_dist":
            raise ValueError(
                f"{folder} is in the {backend} format; only torch_dist, torch and safetensors are "
                "known. Load it once with Megatron and save it with --ckpt-format torch_dist"
            )
        return TorchDistCheckpoint(folder, trust), Path()
    raise ValueError(
        f"{folder} is no checkpoint: it has neither {TRACKER}, nor {torch_dist.METADATA} of a "
        "torch_dist checkpoint, nor mp_rank_… of one in the torch format"
    )


def _backend(folder: Path) -> str:
    config = folder / "metadata.json"
    if not config.is_file():
        return "torch_dcp"
    return str(json_object(read_text(config), config).get("sharded_backend", "unknown"))
