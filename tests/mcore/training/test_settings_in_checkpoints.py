# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint carries the settings of its residual, and weights load into no other."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader

from megatron_residuals.mcore.training.checkpoint import convert_block_length, read_settings
from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.toy_gpt import ToyGPT
from tests.mcore.training.saving import (
    BLOCKS,
    PLAIN,
    State,
    load_into,
    quiet,
    save_from,
    start,
    train,
)

ONE = ToyGPT(num_layers=2, hidden_size=16, seq_length=8)
TWO = dataclasses.replace(ONE, tp=2)
PIPELINE = dataclasses.replace(ONE, pp=2, vpp=2, num_layers=4)
PAPER = "mhc(streams=2, mhc_eps=1e-6)"

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """A checkpoint after one step, by residual; None is the stock model."""
    parent = tmp_path_factory.mktemp("saved")
    folders = {
        residual: parent / str(index)
        for index, residual in enumerate([PAPER, BLOCKS, None, "residual()"])
    }

    def run() -> None:
        for residual, folder in folders.items():
            trainer = start(ONE, residual, PLAIN)
            trainer.accumulate()
            trainer.update()
            save_from(trainer, folder)

    run_ranks(1, run)
    return folders


def refusals(folder: Path, residuals: list[str | None], toy: ToyGPT = ONE) -> list[list[str]]:
    """What each rank says to loading the checkpoint into each model; "" if it loads."""

    def run() -> list[str]:
        said = []
        for residual in residuals:
            trainer = start(toy, residual, PLAIN)
            before = trainer.parameters()
            try:
                load_into(trainer, folder)
                said.append("")
            except ValueError as error:
                said.append(str(error))
                after = trainer.parameters()
                assert all(torch.equal(after[name], before[name]) for name in before)
        return said

    return run_ranks(toy.world_size, run)


DIFFERING: list[tuple[str | None, str, list[str]]] = [
    (
        PAPER,
        "mhc(streams=2, mhc_convention='dsv4', mhc_eps=1e-6)",
        ["contraction: saved 'mean', given", "mhc_convention: saved 'paper', given 'dsv4'"],
    ),
    # another shape: the host alone would speak of tensor sizes
    (PAPER, "mhc(streams=3, mhc_eps=1e-6)", ["streams: saved 2, given 3"]),
    (PAPER, "mhc(streams=2)", ["mhc_eps: saved 1e-06, given 1e-20"]),
    (
        PAPER,
        "mhc(streams=2, mhc_eps=1e-6, mhc_sinkhorn_iterations=5)",
        ["mhc_sinkhorn_iterations: saved 20, given 5"],
    ),
    # other keys: the host alone would speak of missing ones
    (PAPER, "hc(streams=2)", ["mechanism: saved 'mhc', given 'hc'"]),
    # no key is missing: the host alone would leave the weights of the mechanism out
    (PAPER, "residual()", ["mechanism: saved 'mhc', given 'residual'"]),
    (PAPER, None, ["mechanism: saved 'mhc', given 'residual'"]),
    (BLOCKS, "block_attnres(block_sublayers=2)", ["block_sublayers: saved 3, given 2"]),
    (BLOCKS, "attnres()", ["block_sublayers: saved 3, given 1"]),
    (
        BLOCKS,
        "block_attnres(block_sublayers=3, attnres_eps=1e-5)",
        ["attnres_eps: saved 1e-06, given 1e-05"],
    ),
    (None, BLOCKS, ["the checkpoint is of a model without a residual mechanism"]),
]


@pytest.mark.parametrize("written", [PAPER, BLOCKS, None])
def test_a_differing_setting_is_named_with_both_values_before_anything_is_loaded(
    saved: dict[str | None, Path], written: str | None
) -> None:
    cases = [(given, expected) for wrote, given, expected in DIFFERING if wrote == written]
    (said,) = refusals(saved[written], [given for given, _ in cases])
    for (given, expected), message in zip(cases, said, strict=True):
        lines = [line for line in message.splitlines() if line.startswith("  - ")]
        assert len(lines) == len(expected), (given, message)
        for line, start_of_line in zip(lines, expected, strict=True):
            assert line.startswith(f"  - {start_of_line}")


def test_every_rank_of_a_pipeline_refuses(saved: dict[str | None, Path]) -> None:
    said = refusals(saved[PAPER], ["mhc(streams=3, mhc_eps=1e-6)"], PIPELINE)
    assert len(said) == 2 and all("streams: saved 2, given 3" in message for (message,) in said)


FREE = [
    "mhc(streams=2, mhc_eps=1e-6, recompute='group:2', mhc_alpha_init=0.5, mhc_init='symmetric')",
    "mhc(streams=2, mhc_eps=1e-6, kernels='torch', transport='full', check_messages=True)",
    "mhc(streams=2, mhc_eps=1e-6, contraction='mean')",
]


def test_what_does_not_change_the_function_may_differ(saved: dict[str | None, Path]) -> None:
    assert refusals(saved[PAPER], list(FREE)) == [[""] * len(FREE)]
    assert refusals(saved[BLOCKS], ["block_attnres(block_sublayers=3, transport='full')"]) == [[""]]


def test_the_record_is_one_small_object_that_needs_no_ranks(
    saved: dict[str | None, Path], tmp_path: Path
) -> None:
    assert read_settings(saved[PAPER]) == {
        "mechanism": "mhc",
        "streams": 2,
        "mhc_convention": "paper",
        "mhc_mixing": "sinkhorn",
        "mhc_sinkhorn_iterations": 20,
        "mhc_eps": 1e-6,
        "contraction": "mean",
    }
    assert read_settings(saved[BLOCKS]) == {
        "mechanism": "block_attnres",
        "block_sublayers": 3,
        "attnres_eps": 1e-6,
        "attnres_heads": 1,
        "attnres_additive": False,
    }
    train(PIPELINE, BLOCKS, PLAIN, 1, save=tmp_path / "saved", save_after=1)
    assert read_settings(tmp_path / "saved") == read_settings(saved[BLOCKS])
    keys = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert [key for key in keys if "residual_settings" in key] == [
        "decoder.residual_settings._extra_state/shard_0_1"
    ]


def test_checkpoints_of_the_plain_residual_are_those_of_the_stock_model(
    saved: dict[str | None, Path],
) -> None:
    plain, stock = saved["residual()"], saved[None]
    keys = [set(FileSystemReader(f).read_metadata().state_dict_metadata) for f in (plain, stock)]
    assert keys[0] == keys[1]
    assert read_settings(plain) is None
    assert refusals(plain, [None]) == refusals(stock, ["residual()"]) == [[""]]


def test_blocks_of_another_length_take_all_weights_over_when_asked(
    saved: dict[str | None, Path],
) -> None:
    """Every sublayer has its query, so no weight is lost or new; the function is another."""

    def run(residual: str) -> tuple[State, list[float]]:
        trainer = start(ONE, residual, PLAIN)
        with convert_block_length():
            load_into(trainer, saved[BLOCKS])
        return trainer.parameters(), trainer.accumulate()

    (same, losses), *others = (
        run_ranks(1, run, residual)[0]
        for residual in (BLOCKS, "block_attnres(block_sublayers=2)", "attnres()")
    )
    for weights, other_losses in others:
        assert weights.keys() == same.keys()
        assert all(torch.equal(weights[name], same[name]) for name in same)
        assert other_losses != losses


def loaded_weights(toy: ToyGPT, folder: Path) -> str:
    """What is said while the weights of a checkpoint are read into a model."""
    state = {"model": start(toy, PAPER, PLAIN).chunks[0].sharded_state_dict()}
    with quiet(), contextlib.redirect_stdout(io.StringIO()) as said:
        dist_checkpointing.load(state, str(folder))
    return said.getvalue()


def test_a_vocabulary_that_is_padded_otherwise_is_pointed_out(
    saved: dict[str | None, Path],
) -> None:
    # With another TP the host pads to other rows and loads them in silence: another first loss.
    def run() -> list[str]:
        toys = [dataclasses.replace(TWO, vocab_size=size) for size in (64, 96)]
        return [loaded_weights(toy, saved[PAPER]) for toy in toys]

    (same, other), (_, elsewhere) = run_ranks(2, run)
    assert same == elsewhere == ""
    assert "warning: embedding.word_embeddings.weight has 64 rows in the checkpoint and 96" in other
    assert "--make-vocab-size-divisible-by 32 keeps it" in other and other.count("\n") == 1


def test_a_file_that_is_cut_off_is_named(saved: dict[str | None, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[PAPER], tmp_path / "cut")
    places = FileSystemReader(folder).read_metadata().storage_data
    (place,) = (p for index, p in places.items() if "residual_settings" in index.fqn)
    file = folder / place.relative_path
    os.truncate(file, place.offset + place.length - 1)
    with pytest.raises(ValueError, match=rf"{file} is cut off: .*; load an earlier iteration"):
        read_settings(folder)


def test_a_plain_state_dict_is_compared_too() -> None:
    def run() -> tuple[Any, list[str]]:
        chunk = start(ONE, PAPER, PLAIN).chunks[0]
        state, said = chunk.state_dict(), []
        chunk.load_state_dict(state)
        for residual in ("mhc(streams=2, mhc_convention='dsv4')", "residual()"):
            other = start(ONE, residual, PLAIN).chunks[0]
            with pytest.raises(ValueError) as refusal:
                # as the host's training loop does after a strict load that failed
                other.load_state_dict(state, strict=False)
            said.append(str(refusal.value))
            other.load_state_dict(other.state_dict())
        return state["decoder.residual_settings._extra_state"], said

    ((record, (other, plain)),) = run_ranks(1, run)
    assert record["mhc_convention"] == "paper"
    assert "mhc_convention: saved 'paper', given 'dsv4'" in other
    assert "mechanism: saved 'mhc', given 'residual'" in plain
