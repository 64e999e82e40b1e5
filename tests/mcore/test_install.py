# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The seams of the host: named, idempotent, reversible, loud when the host has changed.

Every host is tested in both forms: as it is, and with the hooks that ``patches/`` give its sources
(set here as attributes; ``test_patches.py`` trains through really patched sources).
"""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterator
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


@pytest.fixture
def add_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[seams.Seam], None]]:
    """Makes the running host one whose sources are patched."""

    def add(seam: seams.Seam) -> None:
        module = importlib.import_module(seam.module)
        assert not hasattr(module, seam.hook)
        monkeypatch.setattr(module, seam.hook, getattr(module, seam.name), raising=False)

    yield add
    seams.uninstall()  # before the hooks go


@pytest.fixture(params=["replaced", "native"])
def state(request: pytest.FixtureRequest, add_hook: Callable[[seams.Seam], None]) -> str:
    """The state of an installed seam, on a host of that form."""
    for seam in seams.SEAMS if request.param == "native" else ():
        add_hook(seam)
    return request.param


def symbols() -> dict[str, Any]:
    """What stands under every name of every seam: symbols, and hooks where there are any."""
    return {
        f"{seam.module}.{name}": found
        for seam in seams.SEAMS
        for name in (seam.name, seam.hook)
        if (found := getattr(importlib.import_module(seam.module), name, None)) is not None
    }


def test_installing_twice_is_once_and_uninstalling_restores_every_name(state: str) -> None:
    stock = symbols()
    seams.install()
    once = symbols()
    seams.install()
    assert symbols() == once
    ours = {seam.path for seam in seams.SEAMS}
    assert {path for path in stock if once[path] is not stock[path]} == ours
    assert {seam.path.endswith(f".{seam.hook}") for seam in seams.SEAMS} == {state == "native"}
    assert seams.is_installed()
    seams.uninstall()
    assert symbols() == stock
    assert not seams.is_installed()


def test_the_report_names_every_seam_and_its_state(state: str) -> None:
    before = seams.report()
    seams.install()
    after = seams.report()
    for seam in seams.SEAMS:
        assert seam.state == state
        assert f"  stock     {seam.path}: " in before
        assert f"  {state:<8}  {seam.path}: " in after
    assert megatron.core.__version__ in after


def test_each_seam_of_a_partly_patched_host_is_taken_in_its_own_way(
    add_hook: Callable[[seams.Seam], None],
) -> None:
    add_hook(seams.SEAMS[0])
    stock = symbols()
    seams.install()
    assert [seam.state for seam in seams.SEAMS] == ["native", "replaced", "replaced", "replaced"]
    seams.uninstall()
    assert symbols() == stock


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
    module = "megatron.core.pipeline_parallel.schedules"
    gone = seams.Seam(module, "NoSuchName", "no_such_hook", "", "compose.block_factory")
    monkeypatch.setattr(seams, "SEAMS", (*seams.SEAMS, gone))
    with pytest.raises(
        RuntimeError, match=r"schedules\.NoSuchName does not exist in megatron-core"
    ):
        seams.install()
    assert "  stock     megatron.core.pipeline_parallel.schedules.NoSuchName" in seams.report()
    monkeypatch.undo()
    assert symbols() == stock


class Other:
    """What another plugin puts in the place of a class of the host's."""


@pytest.mark.parametrize("seam", seams.SEAMS[:2], ids=lambda seam: seam.name)
@pytest.mark.parametrize("other", [Other, lambda *args: Other()], ids=["class", "maker"])
def test_another_plugin_on_the_block_or_the_communicator_is_refused(
    state: str, monkeypatch: pytest.MonkeyPatch, seam: seams.Seam, other: Any
) -> None:
    monkeypatch.setattr(importlib.import_module(seam.module), seam.attribute, other)
    stock = symbols()
    with pytest.raises(RuntimeError, match="another plugin replaced it"):
        seams.install()
    assert symbols() == stock


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


@pytest.mark.parametrize(
    "seam",
    (*seams.SEAMS, *seams.AROUND, seams.OPTIMIZER, seams.LOGGING, *seams.SCRIPT),
    ids=lambda seam: seam.name,
)
def test_every_seam_names_a_function_of_ours_that_makes_what_goes_there(seam: seams.Seam) -> None:
    room, _, function = seam.maker.rpartition(".")
    module = importlib.import_module(f"megatron_residuals.mcore.{room}")
    assert callable(getattr(module, function))


def training_log(loss_dict: dict[str, float], iteration: int) -> None:
    """As the training loop's, as far as we use it."""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A training loop that is imported, where the host may have none."""
    package = types.ModuleType("megatron.training")
    loop = types.ModuleType("megatron.training.training")
    loop.training_log = training_log
    loop.setup_model_and_optimizer = lambda: "built"
    loop.get_megatron_optimizer_config = lambda: (None, None)
    parser = types.ModuleType("megatron.training.arguments")
    parser.add_megatron_arguments = lambda parser: parser
    package.training, package.arguments = loop, parser
    for module in (package, loop, parser):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield loop
    seams.uninstall()  # before the modules go


# The runner's two wraps and that of the log were once none of the seams: installed twice they were
# two, uninstalling left the runner's, and the report named none of them.
def test_what_is_wrapped_in_a_training_loop_is_listed_once_and_comes_off_again(
    loop: types.ModuleType,
) -> None:
    more = (seams.LOGGING, *seams.SCRIPT)
    stock = dict(vars(loop))
    seams.install()
    assert vars(loop).keys() == stock.keys() and loop.training_log is training_log
    seams.install(more)
    once = dict(vars(loop))
    seams.install(more)
    assert vars(loop) == once
    assert loop.training_log.__wrapped__ is training_log
    for seam in (*more, seams.OPTIMIZER):
        assert seams.report().count(f"  replaced  {seam.path}: {seam.purpose}") == 1
    seams.uninstall()
    assert vars(loop) == stock


def test_a_script_that_built_a_plain_model_is_told_so(loop: types.ModuleType) -> None:
    gc.collect()  # models of other tests
    seams.install(seams.SCRIPT)
    with pytest.raises(ValueError, match="the script has built a model without one"):
        loop.setup_model_and_optimizer()
