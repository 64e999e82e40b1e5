# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The seams of the host: named, idempotent, reversible, loud when the host has changed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import megatron.core
import pytest

from megatron_residuals.mcore import install as seams
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    seams.uninstall()
    yield
    seams.install()


def symbols() -> dict[str, Any]:
    return {s.path: getattr(importlib.import_module(s.module), s.name) for s in seams.SEAMS}


def test_installing_twice_is_once_and_uninstalling_restores_every_symbol() -> None:
    stock = symbols()
    seams.install()
    once = symbols()
    seams.install()
    assert symbols() == once
    assert all(once[path] is not stock[path] for path in stock)
    assert seams.is_installed()
    seams.uninstall()
    assert symbols() == stock
    assert not seams.is_installed()


def test_the_report_names_every_seam_and_its_state() -> None:
    before = seams.report()
    seams.install()
    after = seams.report()
    for seam in seams.SEAMS:
        assert f"stock     {seam.path}" in before
        assert f"replaced  {seam.path}" in after
    assert megatron.core.__version__ in after


def test_a_stock_model_runs_through_the_installed_seams_unchanged() -> None:
    toy = ToyGPT(pp=2, vpp=2)
    expected = run_toy(toy)
    seams.install()
    actual = run_toy(toy)
    assert actual.losses == expected.losses
    assert all((actual.grads[name] == grad).all() for name, grad in expected.grads.items())


def test_a_missing_symbol_is_named_with_the_version_and_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = symbols()
    gone = seams.Seam("megatron.core.pipeline_parallel.schedules", "NoSuchName", "", lambda s: s)
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, gone))
    with pytest.raises(
        RuntimeError, match=r"schedules\.NoSuchName does not exist in megatron-core"
    ):
        seams.install()
    monkeypatch.undo()
    assert symbols() == stock


def test_another_plugin_on_the_communicator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    class Other:
        pass

    monkeypatch.setattr(schedules, "P2PCommunicator", Other)
    with pytest.raises(RuntimeError, match="another plugin replaced it"):
        seams.install()


def test_a_version_outside_the_window_is_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.21.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.21\.0 is outside the tested window"):
        seams.install()
    monkeypatch.setenv("MEGATRON_RESIDUALS_ALLOW_UNTESTED_HOST", "1")
    seams.install()
    assert seams.is_installed()


def test_a_residual_spec_without_the_seams_fails_instead_of_training_a_plain_model() -> None:
    # the stock block would call our layers with a hidden state instead of a residual state
    spec = spec_for("mhc()")
    seams.uninstall()
    with pytest.raises(RuntimeError, match="ranks"):
        run_toy(ToyGPT(), spec)
