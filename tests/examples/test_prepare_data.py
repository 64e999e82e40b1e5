# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's data set: which text is in it, and that Megatron reads back what was written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from examples import prepare_data

FILES = {
    "alpha.py": "print('α')\n",
    "package/__init__.py": "",
    "package/beta.py": "x = 1\n" * 7,
    "package/gamma.py": "# gamma\n",
    "notes.txt": "not Python\n",
    "test/test_alpha.py": "assert True\n",
    "package/tests/test_beta.py": "assert True\n",
    "site-packages/other/code.py": "import this\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def read_documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset[0].dtype == np.uint16
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_documents_read_back_as_their_bytes_and_the_end_of_document(
    library: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "out" / "data"
    summary = prepare_data.prepare(prefix, max_mib=1, seed=0, root=library)
    expected = [FILES[name].encode() for name in ("alpha.py", "package/beta.py")]
    expected.append(FILES["package/gamma.py"].encode())
    documents = read_documents(prefix)
    assert sorted(documents) == sorted([[*content, 256] for content in expected])
    assert summary["documents"] == 3
    assert summary["tokens"] == sum(map(len, documents))


def test_tests_third_party_code_and_other_files_are_left_out(library: Path) -> None:
    names = [str(p.relative_to(library)) for p in prepare_data.source_files(library)]
    assert names == ["alpha.py", "package/__init__.py", "package/beta.py", "package/gamma.py"]


def test_a_folder_above_the_library_may_be_called_test(tmp_path: Path) -> None:
    root = tmp_path / "test" / "lib"
    root.mkdir(parents=True)
    (root / "a.py").write_text("a\n")
    assert prepare_data.source_files(root) == [root / "a.py"]


def test_the_limit_admits_whole_files_only(library: Path) -> None:
    files = prepare_data.source_files(library)
    sizes = {len(text.encode()) for text in FILES.values()}
    for limit in range(8, 70):
        documents = prepare_data.choose_documents(files, max_bytes=limit, seed=3)
        assert documents
        assert sum(map(len, documents)) <= limit
        assert {len(content) for content in documents} <= sizes


def test_the_order_is_the_seeds_alone(library: Path) -> None:
    files = prepare_data.source_files(library)
    orders = [
        prepare_data.choose_documents(files, max_bytes=999, seed=seed) for seed in (*range(8), 0)
    ]
    assert orders[0] == orders[-1]
    assert len({tuple(order) for order in orders}) > 1
    assert files == sorted(files)  # the caller's list is not shuffled


def test_unigram_entropy_is_that_of_the_token_frequencies() -> None:
    assert prepare_data.unigram_entropy([b"ab"]) == pytest.approx(math.log(3))
    half_quarters = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert prepare_data.unigram_entropy([b"a", b"ab", b"ab", b"a" * 8]) == pytest.approx(
        -sum(p * math.log(p) for p in (11 / 17, 2 / 17, 4 / 17))
    )
    assert prepare_data.unigram_entropy([b"aab"]) == pytest.approx(half_quarters)


def test_the_same_settings_are_not_written_twice(library: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    first = prepare_data.prepare(prefix, max_mib=1, seed=0, root=library)
    (library / "late.py").write_text("a later file\n")
    again = prepare_data.prepare(prefix, max_mib=1, seed=0, root=library)
    assert (first.pop("reused"), again.pop("reused")) == (False, True)
    assert first == again
    assert len(read_documents(prefix)) == 3


@pytest.mark.parametrize("changed", [{"seed": 1}, {"max_mib": 2.0}])
def test_other_settings_are_written_anew(
    library: Path, tmp_path: Path, changed: dict[str, float]
) -> None:
    prefix, settings = tmp_path / "data", {"max_mib": 1.0, "seed": 0}
    prepare_data.prepare(prefix, root=library, **settings)
    (library / "late.py").write_text("a later file\n")
    summary = prepare_data.prepare(prefix, root=library, **(settings | changed))
    assert not summary["reused"]
    assert len(read_documents(prefix)) == summary["documents"] == 4


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_half_written_set_is_written_anew(library: Path, tmp_path: Path, suffix: str) -> None:
    prefix = tmp_path / "data"
    prepare_data.prepare(prefix, max_mib=1, seed=0, root=library)
    Path(f"{prefix}{suffix}").unlink()
    assert not prepare_data.prepare(prefix, max_mib=1, seed=0, root=library)["reused"]
    assert len(read_documents(prefix)) == 3


def test_a_failed_write_leaves_no_summary_behind(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "data"
    prepare_data.prepare(prefix, max_mib=1, seed=0, root=library)

    def fail(documents: list[bytes], prefix: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(prepare_data, "write_dataset", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_data.prepare(prefix, max_mib=1, seed=1, root=library)
    assert not Path(f"{prefix}.json").exists()


def test_a_limit_below_every_file_is_refused_by_name(library: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No Python source file of .*library fits.*--max-mib"):
        prepare_data.prepare(tmp_path / "data", max_mib=1e-6, seed=0, root=library)


def test_the_command_line_says_what_it_wrote(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "data"
    arguments = ["--output-prefix", str(prefix), "--root", str(library), "--max-mib", "1"]
    prepare_data.main(arguments)
    prepare_data.main(arguments)
    summary = json.loads(Path(f"{prefix}.json").read_text())
    wrote, reused = capsys.readouterr().out.splitlines()
    assert f"documents 3, tokens {summary['tokens']}, unigram entropy" in wrote
    assert reused == wrote.replace("wrote", "reused", 1)


def test_the_standard_library_is_the_text_by_default(tmp_path: Path) -> None:
    summary = prepare_data.prepare(tmp_path / "data", max_mib=0.25, seed=0)
    assert 200_000 < summary["tokens"] <= 2**18 + summary["documents"]
    assert 2.5 < summary["unigram_entropy_nats"] < 4.0  # English-like code, nats per byte
