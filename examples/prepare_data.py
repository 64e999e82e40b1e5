# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenise Python's standard library, byte by byte, into a Megatron indexed data set.

Real text that every machine has: one document per source file of the running interpreter. Token ids
0 ... 255 are the bytes and 256 ends a document, so a model needs a vocabulary of 257:
``--tokenizer-type NullTokenizer --vocab-size 257`` from Megatron-Core 0.18 on, ``--vocab-size 256``
on 0.17, which counts the end-of-document token on top.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sysconfig
from pathlib import Path

import numpy as np

EOD = 256
VOCAB_SIZE = 257
# Not library code: tests, bundled third-party packages.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
FORMAT = 1  # raised when the same settings would give other tokens


def source_files(root: Path) -> list[Path]:
    """Every ``*.py`` file below ``root`` that is library code, sorted by path."""
    files = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in files if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))


def choose_documents(files: list[Path], *, max_bytes: int, seed: int) -> list[bytes]:
    """Whole, non-empty files in shuffled order, as many as fit into ``max_bytes``.

    Shuffled because Megatron splits train from validation by position: in alphabetical order the
    validation set would be one corner of the library, and so would any part of it.
    """
    order = list(files)
    random.Random(seed).shuffle(order)
    documents: list[bytes] = []
    total = 0
    for path in order:
        content = path.read_bytes()
        if content and total + len(content) <= max_bytes:
            documents.append(content)
            total += len(content)
    return documents


def unigram_entropy(documents: list[bytes]) -> float:
    """Entropy of the token frequencies in nats: the loss of the best guess without context."""
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    counts[EOD] = len(documents)
    for content in documents:
        counts[:EOD] += np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=EOD)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def write_dataset(documents: list[bytes], prefix: Path) -> None:
    """Write ``PREFIX.bin`` (uint16 tokens) and ``PREFIX.idx``, one document per entry."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for content in documents:
        tokens = np.append(np.frombuffer(content, dtype=np.uint8).astype(np.int64), EOD)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def prepare(
    prefix: Path, *, max_mib: float, seed: int, root: Path | None = None
) -> dict[str, object]:
    """Write the data set unless one with the same settings is there; return its summary.

    Args:
        prefix: path without suffix; ``.bin``, ``.idx`` and the summary ``.json`` are written.
        max_mib: upper limit of the text, in MiB (2**20 bytes).
        seed: seed of the order of the files.
        root: folder to read instead of the running interpreter's standard library.

    Raises:
        ValueError: the limit admits no file.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    settings = {
        "format": FORMAT,
        "root": str(root),
        "python": platform.python_version(),
        "max_mib": max_mib,
        "seed": seed,
    }
    summary_path = Path(f"{prefix}.json")
    parts = (summary_path, Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    if all(path.is_file() for path in parts):
        summary = json.loads(summary_path.read_text())
        if summary["settings"] == settings:
            return summary | {"reused": True}
    documents = choose_documents(source_files(root), max_bytes=int(max_mib * 2**20), seed=seed)
    if not documents:
        raise ValueError(
            f"No Python source file of {root} fits into {max_mib} MiB. Raise --max-mib, or name a "
            "folder with Python sources by --root."
        )
    summary = {
        "settings": settings,
        "documents": len(documents),
        "tokens": sum(len(content) + 1 for content in documents),
        "unigram_entropy_nats": unigram_entropy(documents),
    }
    prefix.parent.mkdir(parents=True, exist_ok=True)
    summary_path.unlink(missing_ok=True)  # a run that dies half-way must not look finished
    write_dataset(documents, prefix)
    summary_path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary | {"reused": False}


def main(arguments: list[str] | None = None) -> None:
    """Command line: prepare the data set and say what is in it."""
    parser = argparse.ArgumentParser(description="Byte-level data set of Python's standard library")
    parser.add_argument("--output-prefix", type=Path, required=True, help="path without suffix")
    parser.add_argument("--max-mib", type=float, default=8.0, help="limit of the text in MiB")
    parser.add_argument("--seed", type=int, default=1234, help="order of the files")
    parser.add_argument("--root", type=Path, help="read this folder, not the standard library")
    given = parser.parse_args(arguments)
    summary = prepare(given.output_prefix, max_mib=given.max_mib, seed=given.seed, root=given.root)
    print(
        f"{'reused' if summary['reused'] else 'wrote'} {given.output_prefix}.bin/.idx: "
        f"documents {summary['documents']:,}, tokens {summary['tokens']:,}, "
        f"unigram entropy {summary['unigram_entropy_nats']:.3f} nats per token"
    )


if __name__ == "__main__":
    main()
