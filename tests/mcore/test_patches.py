# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The source patches: they apply to the running host, and train as the run-time seams do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from packaging.version import Version

from megatron_residuals.mcore import install as seams
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy
from tests.mcore import train_patched
from tests.mcore.train_patched import LAYOUTS, SPEC

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
TOOLS = {
    "patch": ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "--input"],
    "git": ["git", "apply"],
}

pytestmark = pytest.mark.host


def patch_of_running_host() -> Path:
    major, minor, _ = Version(megatron.core.__version__).release
    (path,) = PATCHES.glob(f"megatron-core-{major}.{minor}.*.patch")
    return path


def run_tool(command: list[str], folder: Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    # git would otherwise look for a repository around the folder and leave out what is not in it
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the two files of the running host that patches touch."""
    for seam in seams.SEAMS:
        name = Path(*seam.module.split(".")).with_suffix(".py")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(megatron.core.__path__[0]).parents[1] / name, tmp_path / name)
    return tmp_path


def contents(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*.*")}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_patch_applies_without_fuzz_compiles_and_comes_off_again(tree: Path, tool: str) -> None:
    before = contents(tree)
    patch = str(patch_of_running_host())
    assert "offset" not in run_tool([*TOOLS[tool], patch], tree)
    patched = contents(tree)
    assert patched.keys() == before.keys() and len(patched) == 2
    for name, text in patched.items():
        assert text != before[name]
        compile(text, name, "exec")
    for seam in seams.SEAMS:
        text = patched[f"{seam.module.replace('.', '/')}.py"]
        # the hook's value without a plugin is the symbol that it stands for
        assert re.search(rf"^{seam.hook} = {seam.name}$", text, re.MULTILINE)
    command = TOOLS[tool]
    run_tool([*command[:2], "-R", *command[2:], patch], tree)
    assert contents(tree) == before


def test_a_patch_leaves_no_call_of_a_symbol_that_has_a_hook(tree: Path) -> None:
    # calls of the first two, and the two schedules where one of them is chosen
    calls = re.compile(
        r"^ .*= (?:(?:TransformerBlock|P2PCommunicator)\(|forward_backward_pipelining_with)", re.M
    )
    assert len(calls.findall("".join(contents(tree).values()))) == 5
    run_tool([*TOOLS["git"], str(patch_of_running_host())], tree)
    assert not calls.findall("".join(contents(tree).values()))


def train_on_patched_copy(folder: Path) -> dict[str, Any]:
    shutil.copytree(megatron.core.__path__[0], folder / "megatron" / "core")
    run_tool([*TOOLS["git"], str(patch_of_running_host())], folder)
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, train_patched.__file__, str(folder / "saved.pt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "saved.pt")


@pytest.mark.slow
def test_a_patched_host_trains_bit_for_bit_as_the_run_time_seams_and_no_symbol_is_replaced(
    tmp_path: Path,
) -> None:
    saved = train_on_patched_copy(tmp_path)
    assert saved["host"] == str(tmp_path / "megatron" / "core")
    assert saved["states"] == ["native"] * len(seams.SEAMS), saved["report"]
    assert saved["replaced"] == []
    here = {name: run_toy(ToyGPT(**layout), spec_for(SPEC)) for name, layout in LAYOUTS.items()}
    assert {seam.state for seam in seams.SEAMS} == {"replaced"}
    here["stock"] = run_toy(ToyGPT(**LAYOUTS["pp2-vpp2"]))
    assert here["stock"].losses != here["pp2-vpp2"].losses
    for name, expected in here.items():
        losses, grads = saved["results"][name]
        assert losses == expected.losses
        assert grads.keys() == expected.grads.keys()
        assert all(torch.equal(grads[key], grad) for key, grad in expected.grads.items())


def test_the_readme_lists_every_patch_and_every_hook() -> None:
    readme = (PATCHES / "README.md").read_text()
    for path in PATCHES.glob("*.patch"):
        assert f"| `{path.name}` |" in readme
        lines = path.read_text().splitlines()
        changed = [sum(line.startswith(sign) for line in lines) - 2 for sign in "+-"]
        assert changed == [16, 5]
    for seam in seams.SEAMS:
        assert f"`{seam.hook}`" in readme
