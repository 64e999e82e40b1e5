# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The residual mechanisms: one entry each, in one table. Everything else asks the entry.

    entry      options, rows or sources, what it keeps and moves, settings     standard library
    module     the modules of its sublayers and head                          torch
    probe      its metrics, and how they are taken
    public     its names in released models

A mechanism of your own is named ``module:NAME``, where ``NAME`` is a `Mechanism` in a module that
Python finds (docs/own-mechanism.md).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys

from megatron_residuals.mechanisms.base import (
    LIBRARIES,
    Mechanism,
    NoOptions,
    Place,
    Reading,
    Setting,
)
from megatron_residuals.mechanisms.options import Option, option, options_of
from megatron_residuals.mechanisms.plain import PLAIN
from megatron_residuals.mechanisms.sources import ATTNRES, BLOCK_ATTNRES
from megatron_residuals.mechanisms.streams import HC, IHC, MHC, SINGLE_PASS_MHC

__all__ = [
    "ATTNRES",
    "BLOCK_ATTNRES",
    "HC",
    "IHC",
    "LIBRARIES",
    "MHC",
    "Mechanism",
    "NoOptions",
    "Option",
    "PLAIN",
    "Place",
    "Reading",
    "SINGLE_PASS_MHC",
    "Setting",
    "TABLE",
    "mechanism_in_file",
    "mechanism_named",
    "option",
    "options_of",
]

TABLE: tuple[Mechanism, ...] = (PLAIN, HC, MHC, IHC, SINGLE_PASS_MHC, ATTNRES, BLOCK_ATTNRES)


@functools.cache
def mechanism_named(name: str) -> Mechanism:
    """The entry of a built-in mechanism, or ``module:NAME`` of another.

    Raises:
        ValueError: there is none of that name; says what is allowed.
    """
    for entry in TABLE:
        if entry.name == name:
            return entry
    if isinstance(name, str) and ":" in name:
        return _imported(name)
    known = [entry.name for entry in TABLE]
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"mechanism is {name!r}{hint}; allowed: {', '.join(known)}, or module:NAME of your own"
    )


def mechanism_in_file(name: str) -> Mechanism:
    """The entry of a name that a file says: a file chooses no module that is imported.

    Raises:
        ValueError: it is neither built in nor of a module that this process has imported.
    """
    module, _, attribute = str(name).partition(":")
    if attribute and module not in sys.modules:
        raise ValueError(
            f"mechanism is {name!r}, of a module that is not imported here; name it by "
            f"--residual {name} where the command takes that flag, or import {module} first"
        )
    return mechanism_named(name)


def _imported(name: str) -> Mechanism:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(
            f"mechanism is {name!r}, but {module} cannot be imported ({error}); put its folder on "
            "PYTHONPATH or install it"
        ) from error
    if not isinstance(found, Mechanism):
        there = "has no such name" if found is None else f"holds a {type(found).__name__} there"
        raise ValueError(
            f"mechanism is {name!r}, but {module} {there}; give the name of an instance of "
            "megatron_residuals.mechanisms.Mechanism"
        )
    found.name = name
    return found
