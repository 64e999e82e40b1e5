# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every kind get tensors added, and keep the rest of the model bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange import (
    ModelShape,
    initial_parameters,
    open_checkpoint,
    shaped_for,
    tensor_file,
)
from megatron_residuals.interchange.torch_dist import COMMON_ENTRY
from megatron_residuals.settings import settings_of
from tests.interchange.cases import HIDDEN, LAYERS, assert_same, dense_tensors

CONFIG = ResidualConfig("block_attnres", block_layers=2)
RECORD = settings_of(CONFIG, LAYERS)
EXTRA = "decoder.layers.mlp.linear_fc2._extra_state/shard_0_3"
MOMENT = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"


def write_torch_dist(
    folder: Path, common_file: bool, tensors: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What the host writes, by torch alone: stacked layers, objects, and an optimizer's state."""
    tensors = dense_tensors(stacked=True) if tensors is None else tensors
    common = {"args": argparse.Namespace(hidden_size=HIDDEN, no_save_optim=None), "iteration": 7}
    objects: dict[str, Any] = {**tensors, EXTRA: [b"some"], MOMENT: torch.ones(LAYERS, HIDDEN, 8)}
    if not common_file:
        objects[COMMON_ENTRY] = [common]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(objects, checkpoint_id=folder, planner=planner)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "integrity.json").write_text("{}")
    if common_file:
        torch.save(common, folder / "common.pt")
    return tensors


def write_all_iterations(folder: Path) -> dict[str, Tensor]:
    tensors = write_torch_dist(folder / "iter_0000007", common_file=False)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return tensors


def write_legacy(folder: Path) -> dict[str, Tensor]:
    tensors = dense_tensors()
    content = {"model": {**tensors, "decoder.layers.0.mlp._extra_state": None}, "optimizer": {}}
    (folder / "mp_rank_00").mkdir(parents=True)
    content["args"] = argparse.Namespace(residual=None)  # type: ignore[assignment]
    torch.save(content, folder / "mp_rank_00" / "model_optim_rng.pt")
    return tensors


def write_state_dict(path: Path) -> dict[str, Tensor]:
    torch.save(dense_tensors(), path)
    return dense_tensors()


def write_safetensors(path: Path) -> dict[str, Tensor]:
    if not tensor_file.is_available():
        pytest.skip("safetensors is not installed")
    tensor_file.write_tensors(path, dense_tensors(), {"note": "kept"})
    return dense_tensors()


KINDS: dict[str, tuple[str, Callable[[Path], dict[str, Tensor]]]] = {
    "torch_dist": ("input", lambda path: write_torch_dist(path, common_file=False)),
    "torch_dist with common.pt": ("input", lambda path: write_torch_dist(path, common_file=True)),
    "torch_dist, all iterations": ("input", write_all_iterations),
    "torch": ("input", write_legacy),
    "state dict": ("input.pt", write_state_dict),
    "safetensors": ("input.safetensors", write_safetensors),
}


pytestmark = pytest.mark.filterwarnings(
    r"ignore:torch\.distributed is (disabled|unavailable):UserWarning"
)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_added_and_the_model_is_kept_bit_for_bit(kind: str, tmp_path: Path) -> None:
    name, write = KINDS[kind]
    tensors = write(tmp_path / name)
    source = open_checkpoint(tmp_path / name)
    assert source.checkpoint.settings() is None
    shape = ModelShape.of(source.checkpoint.shapes)
    assert (shape.num_layers, shape.hidden_size) == (LAYERS, HIDDEN)
    added = shaped_for(initial_parameters(CONFIG, LAYERS, HIDDEN), shape)
    target = tmp_path / name.replace("input", "output")
    source.write_with(target, added, RECORD, {"residual": "block_attnres"})
    written = open_checkpoint(target)
    assert written.inside == source.inside and written.tracker == source.tracker
    assert written.checkpoint.settings() == RECORD
    assert_same(written.checkpoint.read(bool), {**tensors, **added})
    assert written.checkpoint.left_out() is None
    with pytest.raises(ValueError, match="exists; give another path"):
        source.write_with(target, added, RECORD, {})
    assert_same(open_checkpoint(tmp_path / name).checkpoint.read(bool), tensors)  # left alone


@pytest.mark.parametrize("common_file", [False, True])
def test_a_torch_dist_checkpoint_keeps_objects_and_tells_its_host_what_it_is(
    common_file: bool, tmp_path: Path
) -> None:
    write_torch_dist(tmp_path / "input", common_file)
    source = open_checkpoint(tmp_path / "input").checkpoint
    assert "optimizer's state" in (source.left_out() or "")
    source.write_with(tmp_path / "output", {"x": torch.ones(2)}, RECORD, {"residual": "attnres"})
    entries = dcp.FileSystemReader(tmp_path / "output").read_metadata().state_dict_metadata
    assert EXTRA in entries and MOMENT not in entries
    assert not (tmp_path / "output" / "integrity.json").exists()  # of other files
    if common_file:
        common = torch.load(tmp_path / "output" / "common.pt", weights_only=False)
    else:
        wanted: dict[str, Any] = {COMMON_ENTRY: None, EXTRA: None}
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path / "output"))
        (common,) = wanted[COMMON_ENTRY]
        assert wanted[EXTRA] == [b"some"]
    args = common["args"]
    assert (args.residual, args.no_save_optim, args.hidden_size) == ("attnres", True, HIDDEN)
    assert common["iteration"] == 7


def test_added_tensors_replace_those_of_the_same_name(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "input", common_file=True)
    key = "output_layer.weight"
    new = torch.full((4, 4), 3.0)
    open_checkpoint(tmp_path / "input").write_with(tmp_path / "output", {key: new}, RECORD, {})
    assert torch.equal(open_checkpoint(tmp_path / "output").checkpoint.read(bool)[key], new)


def test_what_cannot_be_converted_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "file.onnx").touch()
    with pytest.raises(ValueError, match="of no known format; files end in .pt"):
        open_checkpoint(tmp_path / "file.onnx")
    with pytest.raises(ValueError, match="is no checkpoint: it has neither"):
        open_checkpoint(tmp_path)
    for rank in ("mp_rank_00_000", "mp_rank_00_001"):
        (tmp_path / "split" / rank).mkdir(parents=True)
    with pytest.raises(ValueError, match="split over 2 ranks.*--ckpt-format torch_dist"):
        open_checkpoint(tmp_path / "split")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    with pytest.raises(ValueError, match="in the torch_dcp format"):
        open_checkpoint(tmp_path / "dcp")
    torch.save({"model0": {}, "model1": {}}, tmp_path / "virtual.pt")
    with pytest.raises(ValueError, match="virtual stages of one pipeline rank"):
        open_checkpoint(tmp_path / "virtual.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        open_checkpoint(tmp_path / "list.pt")
