# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One table of mechanisms, and nobody outside their rooms who knows one by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_residuals.config import COMMON, MECHANISMS, ResidualConfig
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.interchange.public_file import config_of
from megatron_residuals.mechanisms import TABLE, Mechanism, mechanism_named, options_of
from megatron_residuals.settings import compare_settings, settings_of

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_residuals"
ROOMS = PACKAGE / "mechanisms"
NAMES = set(MECHANISMS) - {"residual"}  # the plain one is what everything is compared with
CLASSES = {type(entry).__name__ for entry in TABLE} | {"Streams", "Sources", "StreamState"}
# Files outside the rooms that name a mechanism, and why that is no branch.
KNOWN = {
    "specs.py": "public entry points, --spec NAME",
    "planner/simulate/schemes.py": "what `simulate` compares by default",
    "commands/doctor.py": "options of hosts with a residual of their own",
    "modules/state.py": "the states, shared by mechanisms of a kind",
    "modules/__init__.py": "hands the states on",
    "recompute/steps.py": "the policy `group`, of streams alone",
}


def code_of(path: Path) -> Iterator[str]:
    """Names, attributes and whole strings of a file, docstrings left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_outside_the_rooms_only_the_files_listed_here_know_a_mechanism() -> None:
    knowing = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if ROOMS not in path.parents
        if (NAMES | CLASSES) & set(code_of(path))
    }
    assert knowing == set(KNOWN)


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_an_entry_is_found_by_its_name_and_says_what_it_is(entry: Mechanism) -> None:
    assert mechanism_named(entry.name) is ResidualConfig(entry.name).entry is entry
    assert entry.summary and not entry.summary.endswith(".")


def test_an_option_of_one_name_is_one_option() -> None:
    found = {}
    for entry in TABLE:
        for each in options_of(entry.options):
            assert found.setdefault(each.name, each) == each
            assert not hasattr(ResidualConfig, each.name), each.name
    assert not set(found) & {each.name for each in COMMON}


def test_metrics_of_one_mechanism_have_different_names() -> None:
    for entry in TABLE:
        names = [metric.name for metric in entry.metrics]
        assert len(set(names)) == len(names)


def test_the_readme_says_of_each_mechanism_what_its_entry_says() -> None:
    text = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    assert rows == {entry.name: entry.summary for entry in TABLE}


def test_a_file_chooses_no_module_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record or a journal may name any mechanism; its module is the user's to import."""
    (tmp_path / "chosen_by_a_file.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = "chosen_by_a_file:X"
    (line,) = compare_settings({"mechanism": name}, settings_of(ResidualConfig("mhc"), 4))
    assert line.startswith(f"mechanism: saved {name!r}, given 'mhc'")
    assert list(metrics_of(name)) == list(metrics_of("residual"))
    with pytest.raises(ValueError, match="is not imported here"):
        config_of({"mechanism": name})
