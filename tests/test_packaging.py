# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` gives, and the layout of the project."""

from __future__ import annotations

import configparser
import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import megatron_residuals
from megatron_residuals import versions

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"megatron_residuals", "patches", "examples", "tests", "launch", "docs"}
FILES = {
    "mkdocs.yml",
    "setup.py",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
}
ALLOWED = {"benchmarks", ".ci", ".gitignore", ".git"}
EXTRAS = {"interchange", "wandb", "triton", "te", "demo", "dev", "docs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built, without a network, from a copy: building leaves files beside setup.py."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_residuals", source / "megatron_residuals", ignore=no_caches)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(built), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(read_dist_info(wheel, "METADATA"))


def read_dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode()


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def test_the_wheel_has_the_name_and_the_version_that_the_package_reports(metadata: Message) -> None:
    assert metadata["Name"] == "megatron-residuals"
    assert metadata["Version"] == megatron_residuals.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(versions.specifier("python"))


def test_installing_needs_torch_and_a_supported_megatron_core_and_nothing_else(
    metadata: Message,
) -> None:
    needed = {r.name: r.specifier for r in requirements(metadata) if r.marker is None}
    names = ("torch", "megatron-core")
    assert needed == {name: SpecifierSet(versions.specifier(name)) for name in names}


def test_the_extras_are_the_documented_ones_and_none_asks_for_apex(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    # The name on the package index is another project's.
    assert "apex" not in {r.name.lower() for r in requirements(metadata)}


def test_transformer_engine_is_only_asked_for_with_its_pytorch_part(metadata: Message) -> None:
    (engine,) = [r for r in requirements(metadata) if r.name == "transformer-engine"]
    assert engine.extras == {"pytorch"}


def test_the_wheel_brings_the_console_command(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read_dist_info(wheel, "entry_points.txt"))
    assert dict(parser["console_scripts"]) == {"megatron-residuals": "megatron_residuals.cli:main"}


def test_the_wheel_holds_every_module_of_the_package_and_nothing_from_beside_it(
    wheel: zipfile.ZipFile,
) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = (ROOT / "megatron_residuals").rglob("*.py")
    # A folder without __init__.py would be left out in silence.
    assert packed == {path.relative_to(ROOT).as_posix() for path in source}


def pins_of(name: str) -> dict[str, str]:
    text = (ROOT / ".ci" / "requirements" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def test_the_pinned_sets_satisfy_what_the_package_asks_for(metadata: Message) -> None:
    for pins in ("main.txt", "oldest.txt"):
        pinned = pins_of(pins)
        assert "apex" not in pinned
        for requirement in requirements(metadata):
            if requirement.marker is None:
                assert requirement.specifier.contains(pinned[requirement.name]), (pins, requirement)


def test_what_is_declared_oldest_is_what_the_tests_run_with() -> None:
    """torch 2.6 was declared and never tested: with it the Triton kernels crashed on a GPU."""
    pinned = pins_of("oldest.txt")
    untested = {"python", "triton", "transformer-engine", "fla-core", "liger-kernel"}
    assert versions.OLDEST.keys() - pinned.keys() == untested - {"triton"}
    for package, oldest in versions.OLDEST.items():
        if package not in untested:
            assert not versions.is_too_old(package, pinned[package])
            assert pinned[package].removesuffix(".0") == oldest, package


def test_the_readme_names_the_versions_that_are_declared() -> None:
    oldest, untested = versions.OLDEST, versions.UNTESTED["megatron-core"]
    last = f"0.{int(untested.removeprefix('0.')) - 1}.x"
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    for text in (readme, index):
        assert f"{oldest['megatron-core']} to {last}" in text
    for words in ("Python", "torch", "triton"):
        assert f"{words} ≥ {oldest[words.lower()]}" in readme
    host, torch = versions.NEWER_TORCH_FROM_HOST, versions.NEWER_TORCH
    assert f"Megatron-Core itself from {host} on: torch ≥ {torch}" in readme


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        ("2.5.1+cu124", True),
        ("2.6.0a0+ecf3bae40a.nv25.01", False),  # a container's
        ("2.6", False),
        ("2.14.1+cpu", False),
        ("1.13.1", True),
    ],
)
def test_versions_are_compared_by_their_release(version: str, too_old: bool) -> None:
    assert versions.is_too_old("torch", version) is too_old


def test_the_top_level_holds_what_was_asked_for_and_only_ignored_files_beside_it() -> None:
    present = {path.name for path in ROOT.iterdir()}
    assert {name for name in FOLDERS if not (ROOT / name).is_dir()} == set()
    assert {name for name in FILES if not (ROOT / name).is_file()} == set()
    patterns = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.strip("/") for line in patterns if line and not line.startswith("#")]
    extra = present - FOLDERS - FILES - ALLOWED
    assert {n for n in extra if not any(fnmatch.fnmatch(n, i) for i in ignored)} == set()


def test_the_licence_is_the_full_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "9. Accepting Warranty or Additional Liability." in text
    assert "limitations under the License." in text
