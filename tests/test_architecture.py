# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The floors: each file imports only its own floor and lower ones (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_residuals"
MAX_LINES = 400


@dataclass(frozen=True)
class Floor:
    """A height, and what its files may import besides the standard library and lower floors.

    `inside_functions` is for optional things: imported where used, never with the module. So are
    files of `mechanisms`, from any height: an entry finds the rest of its room where it is wanted.
    """

    height: float
    outside: frozenset[str] = frozenset()
    inside_functions: frozenset[str] = frozenset()


def floor(height: float, outside: str = "", inside_functions: str = "") -> Floor:
    return Floor(height, frozenset(outside.split()), frozenset(inside_functions.split()))


# A package stands for all its files; a longer name overrules a shorter one. "" is the package's own
# __init__: the public face, on top of everything, kept light by a test of its own.
FLOORS = {
    "": floor(6),
    "_version": floor(0),
    "config": floor(0),
    "depth": floor(0),
    "files": floor(0),
    "flags": floor(0),
    "mechanisms": floor(0),
    "mixing": floor(0),
    "mechanisms.plain.module": floor(3, "torch"),
    "mechanisms.streams.module": floor(3, "torch"),
    "mechanisms.sources.module": floor(3, "torch"),
    "mechanisms.plain.exported": floor(3, "torch"),
    "mechanisms.streams.exported": floor(3, "torch"),
    "mechanisms.sources.exported": floor(3, "torch"),
    "mechanisms.streams.probe": floor(4, "torch"),
    "mechanisms.sources.probe": floor(4, "torch"),
    "mechanisms.streams.panels": floor(4),
    "mechanisms.sources.panels": floor(4),
    "mechanisms.streams.public": floor(4, "torch"),
    "mechanisms.sources.kimi_k3": floor(4, "torch"),
    "settings": floor(0),
    "text": floor(0),
    "versions": floor(0),
    "pipeline": floor(0),
    "planner": floor(1),
    "function_modes": floor(1, "torch"),
    "functional": floor(1, "torch"),
    "kernels": floor(2, "torch triton", "fla liger_kernel"),
    "modules": floor(3, "torch"),
    "recompute": floor(3, "torch"),
    "transport": floor(4, "torch"),
    "diagnostics.metric": floor(0),
    "diagnostics.__init__": floor(0),
    "diagnostics": floor(4, "torch", "jinja2 matplotlib numpy tensorboard wandb"),
    "interchange": floor(4, "torch", "safetensors"),
    "interchange.huggingface.modeling_residual_gpt": floor(4, "torch transformers"),
    "interchange.names": floor(1),
    "mcore": floor(5, "torch megatron packaging", "transformer_engine"),
    "cpu_host": floor(5.5, "torch megatron", "transformer_engine typing_extensions"),
    "testing": floor(5.5, "torch megatron", "pytest triton"),
    "specs": floor(6, "torch megatron"),
    "run": floor(6, "torch megatron"),
    "cli": floor(6, "", "torch megatron matplotlib numpy"),
    "__main__": floor(6),
    "commands": floor(6, "", "torch megatron matplotlib numpy"),
}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, and whether only when a function runs, or only for types."""

    name: str
    line: int
    in_function: bool
    for_types: bool


class ImportReader(ast.NodeVisitor):
    """Collects imports anywhere in a file, `importlib.import_module("...")` included."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.imports: list[Import] = []
        self._parents = module.split(".") if is_package else module.split(".")[:-1]
        self._depth, self._for_types = 0, False

    def _add(self, name: str, node: ast.stmt | ast.expr) -> None:
        self.imports.append(Import(name, node.lineno, self._depth > 0, self._for_types))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._parents[: len(self._parents) - node.level + 1] if node.level else []
        for alias in node.names:
            self._add(".".join([*base, *([node.module] if node.module else []), alias.name]), node)

    def visit_If(self, node: ast.If) -> None:
        self._for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        self.generic_visit(node)
        self._for_types = False

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self._add(argument.value, node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef


class Tree:
    """The files of a package by dotted name below it; "pipeline.__init__" keeps its last part."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.files: dict[str, Path] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            self.files["" if parts == ("__init__",) else ".".join(parts)] = path

    def floor_of(self, name: str) -> Floor | None:
        """The floor of a file, by the longest entry of FLOORS that covers it."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if (found := FLOORS.get(".".join(parts[:length]))) is not None:
                return found
        return None

    def targets(self, name: str) -> Iterator[str]:
        """The files that importing the dotted `name` loads, except the package's own __init__.

        `from a.b import c` arrives as a.b.c: c may be a module or a name in a.b's file.
        """
        parts = name.split(".")[1:]
        if not parts or parts[0] not in {file.split(".")[0] for file in self.files}:
            yield ""
            return
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if prefix in self.files:
                yield prefix
            elif f"{prefix}.__init__" in self.files:
                yield f"{prefix}.__init__"

    def imports_of(self, name: str) -> list[Import]:
        is_package = name == "" or name.endswith("__init__")
        inside = name.removesuffix("__init__").rstrip(".")
        module = f"{self.package.name}.{inside}" if inside else self.package.name
        reader = ImportReader(module, is_package)
        reader.visit(ast.parse(self.files[name].read_text(encoding="utf-8")))
        return reader.imports


def import_faults(package: Path) -> list[str]:
    """Every import of `package` that breaks a rule, as `file:line: what is wrong`."""
    tree, faults = Tree(package), []
    for name, path in tree.files.items():
        own, is_entry = tree.floor_of(name), name.startswith("mechanisms.")
        where = path.relative_to(package.parent)
        if own is None:
            faults.append(
                f"{where}: has no floor; give it one in FLOORS of tests/test_architecture.py"
            )
            continue
        for found in tree.imports_of(name):
            if is_entry and own.height == 0 and (found.in_function or found.for_types):
                continue
            faults += [f"{where}:{found.line}: {fault}" for fault in faults_of(tree, own, found)]
    return faults


def faults_of(tree: Tree, own: Floor, found: Import) -> Iterator[str]:
    outermost = found.name.split(".")[0]
    if outermost == tree.package.name:
        heights = {
            target: other.height
            for target in tree.targets(found.name)
            if (other := tree.floor_of(target)) is not None
        }
        target = max(heights, key=heights.__getitem__, default="")
        if heights and heights[target] > own.height:
            label = f"{outermost}.{target}".removesuffix(".")
            yield f"floor {own.height} imports {label} on floor {heights[target]}"
    elif outermost not in sys.stdlib_module_names and outermost not in own.outside:
        if outermost not in own.inside_functions:
            yield f"floor {own.height} may not import {outermost}"
        elif not found.in_function:
            yield f"{outermost} may only be imported inside a function here"


def lines(faults: list[str]) -> str:
    return "\n".join(["", *faults])


def test_every_import_goes_down_and_stays_within_what_its_floor_may_use() -> None:
    faults = import_faults(PACKAGE)
    assert not faults, lines(faults)


SYNTHETIC_FAULTS = {
    "an upward import": ("functional/a.py", "import pkg.modules.m", "on floor 3"),
    "an upward import from": ("functional/a.py", "from pkg.modules import m", "on floor 3"),
    "a name from an upper file": ("functional/a.py", "from pkg.modules.m import X", "on floor 3"),
    "a relative upward import": ("functional/a.py", "from ..modules.m import X", "on floor 3"),
    "a relative import of the face": ("functional/a.py", "from .. import X", "on floor 6"),
    "an upward import in a function": (
        "functional/a.py",
        "def f():\n    from pkg.modules import m",
        "on floor 3",
    ),
    "an upward import for types": (
        "functional/a.py",
        "if TYPE_CHECKING:\n    from pkg.modules.m import X",
        "on floor 3",
    ),
    "an upward import by name": (
        "functional/a.py",
        "importlib.import_module('pkg.modules.m')",
        "on floor 3",
    ),
    "the transport from the plan": (
        "pipeline/plan.py",
        "from pkg.transport.wire import X",
        "on floor 4",
    ),
    "megatron in the transport": (
        "transport/wire.py",
        "import megatron.core",
        "may not import megatron",
    ),
    "the kit from the adapter": ("mcore/layer.py", "import pkg.testing", "on floor 5.5"),
    "megatron below the adapter": (
        "modules/m.py",
        "from megatron.core import tensor_parallel",
        "may not import megatron",
    ),
    "torch on floor 0": ("config.py", "import torch.nn", "may not import torch"),
    "torch in the planner": ("planner/cost.py", "import torch", "may not import torch"),
    "megatron at the top of the command": (
        "cli.py",
        "import megatron.core",
        "only be imported inside a function",
    ),
    "a file without a floor": ("brand_new.py", "", "has no floor"),
}


def write_synthetic_tree(package: Path) -> None:
    """Files on several floors, all of them allowed what they import."""
    allowed = {
        "__init__.py": "from pkg.config import X",
        "config.py": "import json",
        "functional/__init__.py": "from pkg.functional.a import X",
        "functional/a.py": "import torch\nfrom pkg import config",
        "modules/__init__.py": "",
        "modules/m.py": "from ..functional.a import X",
        "pipeline/__init__.py": "",
        "pipeline/plan.py": "from pkg.config import X",
        "transport/__init__.py": "",
        "transport/wire.py": "from pkg.pipeline.plan import X\nfrom pkg.modules.m import Y",
        "mcore/layer.py": "import megatron.core.transformer\nfrom pkg.modules.m import X",
        "testing/__init__.py": "import pkg.mcore.layer",
        "cli.py": "def f():\n    import megatron.core",
    }
    for name, text in allowed.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)


def test_the_checker_finds_nothing_in_a_tree_that_keeps_the_rules(tmp_path: Path) -> None:
    write_synthetic_tree(tmp_path / "pkg")
    assert import_faults(tmp_path / "pkg") == []


@pytest.mark.parametrize("case", SYNTHETIC_FAULTS)
def test_the_checker_catches(case: str, tmp_path: Path) -> None:
    name, text, expected = SYNTHETIC_FAULTS[case]
    write_synthetic_tree(tmp_path / "pkg")
    path = tmp_path / "pkg" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (fault,) = import_faults(tmp_path / "pkg")
    assert fault.startswith(f"pkg/{name}")
    assert expected in fault


def test_importing_the_package_loads_neither_torch_nor_megatron_nor_anything_else() -> None:
    # Modules that the interpreter's own start-up brings in (.pth files) are there before.
    script = (
        "import sys; before = set(sys.modules); import megatron_residuals\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(loaded - set(sys.stdlib_module_names)))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout.strip(), run.stderr) == ("['megatron_residuals']", "")


def test_no_file_is_longer_than_400_lines_and_each_names_its_licence() -> None:
    faults = []
    header = re.compile(
        r"\A(#!.*\n)?# Copyright \(c\) .+\n# SPDX-License-Identifier: Apache-2\.0\n"
    )
    for folder in ("megatron_residuals", "tests", "examples", "benchmarks", ".ci"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if text.count("\n") > MAX_LINES:
                faults.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
            if not header.match(text):
                faults.append(f"{path.relative_to(ROOT)}: no copyright and SPDX lines at its top")
    assert not faults, lines(faults)
