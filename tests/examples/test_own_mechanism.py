# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The mechanism of examples/06_own_mechanism.py gets what the built-in ones have."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_residuals import cli
from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import residual_of
from megatron_residuals.mcore.training import monitor
from megatron_residuals.mechanisms import mechanism_named
from megatron_residuals.settings import compare_settings, settings_of
from megatron_residuals.testing import assert_close
from megatron_residuals.testing.ranks import run_ranks
from megatron_residuals.testing.residual_toy import keep_residual_init, spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    build_chunks,
    run_toy,
    setup_parallel,
    train_step,
)
from tests.mcore.training.saving import PLAIN, train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAME = "06_own_mechanism:DENSEFORMER"
PIPELINE = dict(pp=2, vpp=2)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    sys.modules.pop("06_own_mechanism", None)
    mechanism_named.cache_clear()


def test_it_starts_as_the_plain_model() -> None:
    plain = run_toy(ToyGPT(dtype=torch.float64), initialise=keep_residual_init)
    ours = run_toy(ToyGPT(dtype=torch.float64), spec_for(NAME), initialise=keep_residual_init)
    losses = torch.tensor([ours.losses, plain.losses], dtype=torch.float64)
    assert_close(losses[0], losses[1], dtype=torch.float64, kind="reordered", name="losses")
    assert len(ours.grads) == len(plain.grads) + 2 * 4 + 1


@pytest.mark.parametrize("options", ["", "(transport='full')", "(recompute='block')"])
def test_a_pipeline_with_virtual_stages_has_every_gradient_of_one_process(options: str) -> None:
    toy = ToyGPT(dtype=torch.float64)
    one = run_toy(toy, spec_for(NAME))
    two = run_toy(dataclasses.replace(toy, **PIPELINE), spec_for(NAME + options))
    for name, gradient in one.grads.items():
        assert gradient.abs().max() > 0, name
        assert_close(two.grads[name], gradient, dtype=torch.float64, kind="reordered", name=name)
    if "full" in options:
        assert two.losses == one.losses


def test_a_checkpoint_of_the_pipeline_goes_on_in_one_process(tmp_path: Path) -> None:
    toy = ToyGPT(num_layers=4, hidden_size=16, seq_length=8)
    folder = tmp_path / "saved"
    pipeline = dataclasses.replace(toy, **PIPELINE)
    run = train(pipeline, NAME, PLAIN, 3, save=folder, save_after=1)
    read = train(toy, NAME, PLAIN, 2, load=folder)
    for name, parameter in run.saved.items():
        assert torch.equal(read.before[name], parameter), name
    losses = torch.tensor(read.losses), torch.tensor(run.losses[1:])
    assert_close(*losses, dtype=torch.float32, kind="same_math", name="losses")


def recorded(toy: ToyGPT) -> dict[str, list[float]]:
    monitor.Publisher.publish = lambda self, record: None  # type: ignore[method-assign]
    setup_parallel(toy)
    train_step(build_chunks(toy, spec_for(f"{NAME}(log_interval=1)")), toy)
    record = monitor.log_step(1)
    return {} if record is None else record.series


def test_its_figures_are_recorded_beside_those_of_every_mechanism() -> None:
    ((one,), (_, two)) = (
        run_ranks(toy.world_size, recorded, toy) for toy in (ToyGPT(), ToyGPT(**PIPELINE))
    )
    for name in ("denseformer/embedding_weight", "denseformer/newest_weight"):
        assert len(one[name]) == 9 and len(set(one[name])) == 9
        assert two[name] == pytest.approx(one[name])
    assert two["residual/hidden_rms"] == pytest.approx(one["residual/hidden_rms"], rel=1e-5)


def test_it_brings_a_flag_along() -> None:
    words = ["--lr", "1", "--residual", NAME, "--residual-weight-init", "2.5"]
    assert residual_of(words) == ResidualConfig(NAME, weight_init=2.5)
    assert str(ResidualConfig(NAME, weight_init=2.5)) == f"{NAME}(weight_init=2.5)"
    assert ResidualConfig.parse(f"{NAME}(weight_init=2.5)").weight_init == 2.5


@pytest.mark.parametrize(
    ("mechanism", "options", "said"),
    [
        (NAME, {"weight_init": -1.0}, "weight_init is -1.0; give a finite number above 0"),
        (NAME, {"streams": 2}, "streams is 2, but '06_own_mechanism:DENSEFORMER' does not read it"),
        (NAME, {"recompute": "group"}, "allows none, mix, block, block\\+layer"),
        ("06_own_mechanism:NOTHING", {}, "has no such name"),
        ("06_own_mechanism:Options", {}, "holds a type there"),
        ("nowhere_at_all:X", {}, "cannot be imported"),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_the_built_in_ones(
    mechanism: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ResidualConfig(mechanism, **options)


def test_its_checkpoints_are_its_own() -> None:
    own = settings_of(ResidualConfig(NAME), 4)
    assert compare_settings(own, own) == []
    for other in ("attnres", "block_attnres(block_sublayers=1)", "mhc"):
        (line,) = compare_settings(settings_of(ResidualConfig.parse(other), 4), own)
        assert line.startswith("mechanism: saved ")


def test_plan_and_memory_have_a_row_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--layers", "8", "--pp", "2", "--vpp", "2", "--residual", NAME]) == 0
    own = capsys.readouterr().out
    words = ["plan", "--layers", "8", "--pp", "2", "--vpp", "2", "--block-sublayers", "1"]
    assert cli.main(words) == 0 and capsys.readouterr().out == own
    sizes = "--layers 8 --hidden-size 64 --heads 4 --seq-length 32 --micro-batch-size 1"
    assert cli.main(["memory", *sizes.split(), "--residual", f"{NAME}(weight_init=2.0)"]) == 0
    printed = capsys.readouterr().out
    assert f"{NAME}(weight_init=2.0)" in printed and "block+layer" in printed


def test_check_finds_nothing_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", NAME]) == 0
    printed = capsys.readouterr().out
    assert "fault" not in printed and "is the plain model" in printed
    assert "PP2 x VPP2 under every policy is one process" in printed


def test_check_finds_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is not the same again, and initial values drawn at random."""
    module = importlib.import_module("06_own_mechanism")
    reads = iter(range(10**6))
    attend = module.WeightedRead.attend
    monkeypatch.setattr(
        module.WeightedRead, "attend", lambda self, s: attend(self, s) * (1 + 1e-3 * next(reads))
    )
    monkeypatch.setattr(
        module.Weights, "reset_parameters", lambda self: torch.nn.init.normal_(self.weights)
    )
    assert cli.main(["check", NAME]) == 1
    printed = capsys.readouterr().out
    # gradients are right: the norms of the sublayers do not see the scale
    for check in ("parameters", "replay", "pipeline"):
        assert f"fault  {check}" in printed, printed
