# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every supported host has what we subclass, replace or call, and `doctor` says so."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_residuals.cli import main
from megatron_residuals.mcore import install as seams
from megatron_residuals.mcore import symbols
from megatron_residuals.mcore.symbols import SYMBOLS, HostSymbol, symbol_table

PACKAGE = Path(symbols.__file__).parents[1]
pytestmark = pytest.mark.host


def imported_names() -> Iterator[str]:
    """Dotted names of the host's that the adapter imports, at the top or inside functions."""
    files = [*(PACKAGE / "mcore").rglob("*.py"), PACKAGE / "specs.py", PACKAGE / "run.py"]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_this_host_has_every_symbol_with_the_expected_parameters() -> None:
    faults = {row["path"]: row["fault"] for row in symbol_table() if row["state"] == "missing"}
    assert faults == {}
    trains = is_module("megatron.training")
    absent = [row for row in symbol_table() if row["state"] == "absent"]
    of_training = [r for r in absent if ".training." in r["path"] or r["use"] == symbols.LAUNCHES]
    assert absent == ([] if trains else of_training)


def test_every_name_that_the_adapter_imports_is_in_the_table() -> None:
    table = [symbol.path for symbol in SYMBOLS]
    names = set(imported_names())
    assert len(names) > 20
    for name in sorted(names):
        listed = any(path == name or path.startswith(f"{name}.") for path in table)
        assert listed, f"{name} is imported; give it a line in mcore/symbols.py"


def test_every_seam_is_in_the_table() -> None:
    table = {symbol.path for symbol in SYMBOLS}
    assert {f"{seam.module}.{seam.name}" for seam in seams.seams()} <= table


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        (HostSymbol("megatron.core.utils.no_such_thing"), "does not exist"),
        (HostSymbol("megatron.core.no_module.thing"), "does not exist"),
        (HostSymbol("no_package.thing"), "does not exist"),
        (
            HostSymbol("megatron.core.utils.make_viewless_tensor", ("inp", "other")),
            r"takes no other \(but inp, requires_grad, keep_graph\)",
        ),
    ],
)
def test_what_is_not_there_or_takes_other_parameters_is_told(
    symbol: HostSymbol, words: str
) -> None:
    import re

    fault = symbol.fault()
    assert fault is not None and re.search(words, fault)


def test_doctor_prints_the_table_and_a_missing_symbol_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for symbol in SYMBOLS:
        assert f"{symbol.path}: {symbol.use}" in out
    gone = HostSymbol("megatron.core.utils.no_such_thing", use="ends a stage")
    later = HostSymbol("megatron.core.utils.later", use="--some-flag", optional=True)
    monkeypatch.setattr(symbols, "SYMBOLS", (*SYMBOLS, gone, later))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (problem,) = found["problems"]
    assert "no_such_thing does not exist" in problem and "(ends a stage)" in problem
    assert [row["state"] for row in found["symbols"][-2:]] == ["missing", "absent"]
