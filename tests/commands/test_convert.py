# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals convert`: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_residuals.cli import main
from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange import initial_parameters, open_checkpoint, tensor_file
from megatron_residuals.settings import settings_of
from tests.interchange.cases import (
    HIDDEN,
    LAYERS,
    assert_same,
    dense_tensors,
    random_parameters,
)

needs_safetensors = pytest.mark.skipif(
    not tensor_file.is_available(), reason="safetensors is not installed"
)
MHC = ["--residual", "mhc", "--residual-streams", "2", "--residual-mhc-convention", "dsv4"]
MHC_CONFIG = ResidualConfig("mhc", streams=2, mhc_convention="dsv4")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.save(dense_tensors(), tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


def convert(*words: str | Path) -> int:
    return main(["convert", *map(str, words)])


def error(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The message of a refusal; nothing may have been written."""
    capsys.readouterr()
    assert convert(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_plain_checkpoint_gets_initial_parameters_and_the_table_says_which(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = plain.with_name("attnres.pt")
    assert convert(plain, target, "--residual", "block_attnres", "--residual-block-layers", 1) == 0
    out = capsys.readouterr().out.splitlines()
    config = ResidualConfig("block_attnres", block_layers=1)
    written = open_checkpoint(target).checkpoint
    initial = initial_parameters(config, LAYERS, HIDDEN)
    assert_same(written.read(bool), {**dense_tensors(), **initial})
    assert written.settings() == settings_of(config, LAYERS)
    assert f": torch, {LAYERS} layers, hidden size {HIDDEN}, {len(dense_tensors())} t" in out[0]
    assert out[1] == "residual  block_attnres(block_layers=1)"
    rows = {line.split()[0]: line.split("  ") for line in out[3 : 3 + len(initial)]}
    assert rows.keys() == initial.keys()
    assert rows["decoder.residual_head.query"][-1] == "0"
    assert rows["decoder.layers.2.mlp_residual.key_gain"][-1] == "1"
    share = 84 / sum(tensor.numel() for tensor in dense_tensors().values())
    assert f"total     84 parameters in {len(initial)} tensors, {share:+.2%}" in out
    assert f"output    {target}" in out


def test_a_dry_run_prints_the_same_table_and_writes_nothing(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = plain.with_name("mhc.pt")
    assert convert(plain, target, *MHC, "--dry-run") == 0
    dry = capsys.readouterr().out
    assert not target.exists()
    assert convert(plain, target, *MHC) == 0
    assert dry.replace(" (dry run: not written)", "") == capsys.readouterr().out


@needs_safetensors
def test_exported_parameters_come_back_through_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = random_parameters(MHC_CONFIG)
    tensor_file.write_tensors(tmp_path / "plain.safetensors", dense_tensors(), {})
    source = open_checkpoint(tmp_path / "plain.safetensors")
    source.write_with(
        tmp_path / "trained.safetensors", trained, settings_of(MHC_CONFIG, LAYERS), {}
    )
    assert convert(tmp_path / "trained.safetensors", tmp_path / "x.safetensors", "--export") == 0
    out = capsys.readouterr().out
    assert f"layout    deepseek-v4, {6 * LAYERS + 3} tensors\n" in out
    imported = ["--import-from", str(tmp_path / "x.safetensors")]
    again = tmp_path / "again.safetensors"
    assert convert(tmp_path / "plain.safetensors", again, *imported, *MHC) == 0
    assert_same(open_checkpoint(again).checkpoint.read(bool), {**dense_tensors(), **trained})
    # the paper's convention is another one, and its rows are the transposed ones
    paper = ["--residual", "mhc", "--residual-streams", "2", "--residual-contraction", "learned"]
    paper += ["--residual-mhc-eps", "1e-6"]
    other = tmp_path / "paper.safetensors"
    assert "mhc_convention: saved 'dsv4'" in error(
        capsys, tmp_path / "plain.safetensors", other, *imported, *paper
    )
    words = [*imported, *paper, "--convert-convention"]
    assert convert(tmp_path / "plain.safetensors", other, *words) == 0
    key = "decoder.layers.1.mlp_residual.bias"
    turned = open_checkpoint(other).checkpoint.read(bool)[key]
    res = trained[key][4:].view(2, 2).T.flatten()
    assert torch.equal(turned, torch.cat([trained[key][:4], res]))


def test_refusals_name_the_reason_and_write_nothing(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = plain.with_name("out.pt")
    assert "no residual mechanism given" in error(capsys, plain, target)
    assert "has no parameters to add" in error(capsys, plain, target, "--residual", "residual")
    assert "block_layers is 2" in error(capsys, plain, target, *MHC, "--residual-block-layers", "2")
    assert "does not exist" in error(capsys, plain.with_name("no.pt"), target, *MHC)
    assert "exists; give another path" in error(capsys, plain, plain, *MHC)
    assert "has no parameters of a residual to export" in error(
        capsys, plain, target.with_suffix(".safetensors"), "--export"
    )
    assert "writes a file that ends in .safetensors" in error(capsys, plain, target, "--export")
    assert not target.exists()
    assert convert(plain, target, *MHC) == 0
    capsys.readouterr()
    assert "already has the parameters of a residual" in error(
        capsys, target, plain.with_name("twice.pt"), *MHC
    )
    assert "is of another residual: streams: saved 2, given 3" in error(
        capsys,
        target,
        plain.with_name("x.safetensors"),
        "--export",
        "--residual",
        "mhc",
        "--residual-streams",
        "3",
        "--residual-mhc-convention",
        "dsv4",
    )


def test_sizes_that_the_keys_do_not_tell_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {k: t for k, t in dense_tensors().items() if k.startswith("decoder.layers")}
    torch.save(parts, tmp_path / "parts.pt")
    target = tmp_path / "out.pt"
    assert "give --hidden-size" in error(capsys, tmp_path / "parts.pt", target, *MHC)
    assert convert(tmp_path / "parts.pt", target, *MHC, "--hidden-size", 6) == 0
    written = open_checkpoint(target).checkpoint.read(bool)
    assert written["decoder.residual_head.head_weight"].shape == (2, 12)
