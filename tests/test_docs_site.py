# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds without a warning, and every page can be reached."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed"
)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@needs_mkdocs
def test_the_site_builds_without_warnings_and_documents_the_api(tmp_path: Path) -> None:
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("ResidualConfig", "TransferPlan", "sinkhorn_paper", "RetainedBytes"):
        assert name in api


def test_every_page_has_its_place_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", text[text.index("\nnav:") :]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert named == pages
