# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals doctor`: says what is there and what would fail, and changes nothing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch

from megatron_residuals import __version__
from megatron_residuals.cli import main
from megatron_residuals.commands import doctor
from megatron_residuals.mcore import install as seams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Starts from a host without us; seams of this process belong to other tests too."""
    seams.uninstall()
    yield
    seams.uninstall()
    seams.install()


@pytest.fixture(autouse=True)
def no_gpu(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same findings on every machine. `clean` goes first, and so ends after the monkeypatch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def symbols() -> list[Any]:
    return [getattr(importlib.import_module(seam.module), seam.name) for seam in seams.SEAMS]


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json"])
    return status, json.loads(capsys.readouterr().out)


def problem(capsys: pytest.CaptureFixture[str]) -> str:
    """The only problem found, which must also set the exit status."""
    status, found = examine(capsys)
    (text,) = found["problems"]
    assert status == 1
    return text


def test_a_good_installation_is_described_and_left_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stock = symbols()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert symbols() == stock and not seams.is_installed()
    for name, version in {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "transformer-engine": doctor.installed_version("transformer-engine") or "not installed",
    }.items():
        assert f"  {name:<20}{version}\n" in out
    assert f"  path                {megatron.core.__path__[0]}\n" in out
    assert "inside the tested window [0.16.1, 0.20)" in out
    for seam in seams.SEAMS:
        assert f"  replaced  {seam.path}: {seam.purpose}\n" in out
    assert out.endswith("problems\n  - none\n")


def test_seams_that_are_in_use_stay_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    seams.install()
    ours = symbols()
    status, found = examine(capsys)
    assert (status, symbols(), seams.is_installed()) == (0, ours, True)
    assert [seam["state"] for seam in found["seams"]] == ["replaced"] * len(seams.SEAMS)


def test_json_holds_the_same_findings_and_nothing_else_is_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = examine(capsys)
    assert status == 0
    assert found.keys() == {field.name for field in dataclasses.fields(doctor.Findings)}
    assert found["versions"]["megatron-core"] == megatron.core.__version__
    assert found["versions"]["megatron-residuals"] == __version__
    assert found["in_tested_window"] is True
    assert (found["problems"], found["native_residual_options"]) == ([], [])


def test_a_patched_host_shows_its_hooks_as_native(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seam in seams.SEAMS:
        module = importlib.import_module(seam.module)
        monkeypatch.setattr(module, seam.hook, getattr(module, seam.name), raising=False)
    _, found = examine(capsys)
    expected = [("native", f"{seam.module}.{seam.hook}") for seam in seams.SEAMS]
    assert [(seam["state"], seam["path"]) for seam in found["seams"]] == expected


def test_residual_options_of_the_hosts_own_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer import transformer_config

    fields = [("enable_mhc_connections", bool, False), ("residual_dropout", float, 0.0)]
    newer = dataclasses.make_dataclass(
        "Newer", fields, bases=(transformer_config.TransformerConfig,)
    )
    monkeypatch.setattr(transformer_config, "TransformerConfig", newer)
    _, found = examine(capsys)
    assert found["native_residual_options"] == ["enable_mhc_connections"]


def test_a_host_outside_the_window_is_a_problem_unless_it_is_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.21.0")
    assert "MEGATRON_RESIDUALS_ALLOW_UNTESTED_HOST=1" in problem(capsys)
    monkeypatch.setenv("MEGATRON_RESIDUALS_ALLOW_UNTESTED_HOST", "1")
    status, found = examine(capsys)
    assert (status, found["in_tested_window"]) == (0, False)


def test_another_plugin_at_a_seam_is_a_problem_and_nothing_is_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(schedules, "P2PCommunicator", type("Other", (), {}))
    stock = symbols()
    status, found = examine(capsys)
    assert status == 1 and symbols() == stock
    assert "another plugin replaced it" in found["problems"][0]
    assert {seam["state"] for seam in found["seams"]} == {"stock"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch", "pip install 'torch>=2.6'"),
        ("megatron.core", "pip check"),
        ("megatron_residuals.mcore.install", "pip check"),
    ],
)
def test_what_cannot_be_imported_is_a_problem_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    text = problem(capsys)
    assert f"{name} cannot be imported" in text and words in text


def test_a_half_installed_transformer_engine_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # without its core it raises no ImportError, which Megatron would have survived
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no core')")
    info = tmp_path / "transformer_engine-2.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: transformer-engine\nVersion: 2.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    text = problem(capsys)
    assert "(no core)" in text and "transformer-engine[pytorch]" in text


def test_an_old_torch_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    assert "torch 2.5.1+cu124 is too old" in problem(capsys)


@pytest.mark.parametrize(("host", "problems"), [("0.17.1", 0), ("0.18.0", 1), ("0.19.2", 1)])
def test_a_host_that_needs_a_newer_torch_than_we_do_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str, problems: int
) -> None:
    """From 0.18 on the host loads checkpoints with an option that torch 2.6 does not have."""
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    monkeypatch.setattr(megatron.core, "__version__", host)
    _, found = examine(capsys)
    assert sum("pip install 'torch>=2.7'" in text for text in found["problems"]) == problems
    monkeypatch.setattr(torch, "__version__", "2.7.0a0+git")
    _, found = examine(capsys)
    assert found["problems"] == []


def test_an_optional_library_that_is_too_old_is_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: "0.15.12" if name == "wandb" else installed(name)
    )
    status, found = examine(capsys)
    (note,) = [note for note in found["notes"] if "wandb" in note]
    assert status == 0 and "wandb 0.15.12 is too old" in note and "wandb>=" in note


def test_a_wheel_that_would_run_make_without_a_makefile_is_a_problem_on_a_gpu_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.training")
    status, found = examine(capsys)
    assert (status, found["gpus"]) == (0, [])
    assert any("no GPU is visible" in note for note in found["notes"])
    assert any("--cpu-host leaves that step out" in note for note in found["notes"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    makefile = Path(megatron.core.__path__[0], "datasets", "Makefile")
    assert f"printf 'all:\\n' > {makefile}" in problem(capsys)
    assert main(["doctor"]) == 1
    assert "GPUs                GPU 0, GPU 1\n" in capsys.readouterr().out


def test_without_torch_and_megatron_it_says_what_to_install() -> None:
    # -S: no site-packages
    done = subprocess.run(
        [sys.executable, "-S", "-m", "megatron_residuals", "doctor"],
        cwd=ROOT,
        env={"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "  torch               not installed\n" in done.stdout
    assert "seams, as they would be in a run\n  not examined\n" in done.stdout
    assert "pip install 'torch>=2.6'" in done.stdout
    assert "pip install 'megatron-core>=0.16.1,<0.20'" in done.stdout
