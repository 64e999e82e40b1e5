# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files named in errors, and written so that a failure leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_residuals.files import json_object, naming, read_text, written_beside


def test_whatever_a_library_raises_over_a_file_becomes_one_line_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"^/a/file cannot be read \(KeyError\)$"):
        with naming(Path("/a/file")):
            raise KeyError  # as some do without a word
    with pytest.raises(ValueError, match=r"^/a/file is damaged \(first\)$"):
        with naming(Path("/a/file"), "is damaged"):
            raise RuntimeError("first\nsecond")


def test_text_and_json_are_refused_by_the_name_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ValueError, match=f"{path}: No such file"):
        read_text(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"{path} cannot be read.*utf-8"):
        read_text(path)
    for text in ("{", "[" * 100_000, ""):
        with pytest.raises(ValueError, match=f"{path} is not JSON"):
            json_object(text, path)
    with pytest.raises(ValueError, match=f"{path} holds a JSON list in place of an object"):
        json_object("[]", path)
    assert json_object('{"a": 1}', path) == {"a": 1}


def test_a_file_or_folder_appears_when_all_of_it_is_written(tmp_path: Path) -> None:
    with written_beside(tmp_path / "new" / "file") as path:
        path.write_text("text")
        assert not (tmp_path / "new" / "file").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    umask = os.umask(0)
    os.umask(umask)
    with written_beside(tmp_path / "folder") as path:
        path.mkdir()
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~umask  # not a scratch folder's


def test_a_failure_leaves_nothing_beside_the_target(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with written_beside(tmp_path / "file") as path:
            path.write_text("half")
            raise KeyboardInterrupt
    with pytest.raises(ValueError, match=f"{tmp_path / 'file'} cannot be written .*disk"):
        with written_beside(tmp_path / "file") as path:
            path.write_text("half")
            raise OSError("no room on the disk")
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match="exists; give another path"):
        with written_beside(tmp_path / "file"):
            raise AssertionError("nothing may be begun")
    with pytest.raises(ValueError, match="exists; give another path"):
        with written_beside(tmp_path / "late") as path:
            path.write_text("new")
            (tmp_path / "late").write_text("of another process")
    assert (tmp_path / "late").read_text() == "of another process"
