# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Text for people: faults, aligned tables, sizes. Depends on the standard library only."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

UNITS = ("KiB", "MiB", "GiB")


def fault_list(heading: str, faults: Iterable[str]) -> str:
    """A heading, a colon, and every fault on a line of its own."""
    return "\n".join([f"{heading}:", *(f"  - {fault}" for fault in faults)])


def one_line(error: BaseException) -> str:
    """The message of an error, a ``fault_list`` too, for launchers that mix the lines of ranks."""
    heading, *faults = str(error).split("\n  - ")
    return " ".join([heading, "; ".join(faults)]).rstrip()


def raise_faults(subject: str, faults: Sequence[str]) -> None:
    """Raise ValueError with every fault found in ``subject``; do nothing when there is none."""
    if len(faults) == 1:
        raise ValueError(f"{subject}: {faults[0]}")
    if faults:
        raise ValueError(fault_list(f"{subject}: {len(faults)} faults", faults))


def count_faults(minimum: int, **counts: object) -> list[str]:
    """One sentence for every named value that is not an integer of at least ``minimum``."""
    return [
        f"{name} is {value!r}; it must be an integer of at least {minimum}."
        for name, value in counts.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum
    ]


def first_few(lines: Sequence[str], most: int = 8) -> list[str]:
    """The lines; of many the first ones, and how many more there are."""
    more = len(lines) - most
    return list(lines) if more <= 0 else [*lines[:most], f"and {more} more"]


def reason(error: BaseException) -> str:
    """What went wrong, in one line; of a system's error the file and what it says."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def table(records: Sequence[Mapping[str, str]], left: Container[str] | None = None) -> list[str]:
    """Lines of aligned columns under the names of the fields, which all records share.

    Args:
        left: the columns that are aligned on their left side; the first one if None.
    """
    names = list(records[0])
    left = names[:1] if left is None else left
    rows = [dict(zip(names, names, strict=True)), *records]
    widths = {name: max(len(row[name]) for row in rows) for name in names}

    def cell(name: str, text: str) -> str:
        return text.ljust(widths[name]) if name in left else text.rjust(widths[name])

    return ["  ".join(cell(name, row[name]) for name in names).rstrip() for row in rows]


def format_bytes(count: int) -> str:
    """Binary units with one decimal: 1536 -> "1.5 KiB"."""
    if count < 2**10:
        return f"{count} B"
    size = float(count)
    for unit in UNITS:
        size /= 2**10
        if size < 2**10:
            return f"{size:.1f} {unit}"
    return f"{size / 2**10:.1f} TiB"
