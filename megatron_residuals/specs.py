# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stable entry points for ``--spec megatron_residuals.specs NAME`` and for users' own specs.

The dotted paths end up in users' checkpoints: they are never renamed. Importing this module
replaces the named seams of the host (see ``mcore.install``), since an unmodified script does
nothing else with us.
"""

from __future__ import annotations

import functools
import sys
from typing import TypeVar

from megatron_residuals.config import ResidualConfig
from megatron_residuals.flags import SPECS, named_outside, refuse_other_models, residual_of
from megatron_residuals.mcore.arguments import config_from_global_args
from megatron_residuals.mcore.install import install
from megatron_residuals.mcore.spec import DeferredSpec, replace_residual
from megatron_residuals.text import one_line

SpecT = TypeVar("SpecT")

__all__ = [
    "attnres",
    "block_attnres",
    "from_flags",
    "hc",
    "ihc",
    "mhc",
    "residual",
    "residual_spec",
    "single_pass_mhc",
]


def _check_command_line() -> None:
    """End a script whose ``--spec`` names us and cannot work, in one line.

    The host looks the name up here when it builds the model; a wrong one would be a KeyError.
    """
    script, *words = sys.argv or [""]
    if SPECS not in words:
        return
    try:
        residual_of(words)
        refuse_other_models(script)
    except ValueError as error:
        print(f"{SPECS}: error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


_check_command_line()
install()


def residual_spec(base_spec: SpecT, config: ResidualConfig) -> SpecT:
    """A copy of a Megatron spec whose layers carry the residual of ``config``.

    Args:
        base_spec: a layer ``ModuleSpec``, ``TransformerBlockSubmodules``, or a function that
            returns one.

    Returns:
        A spec of the same kind, for ``GPTModel(transformer_layer_spec=…)``.

    Raises:
        TypeError: the spec is of another kind, or its layers are not ``TransformerLayer``s.
    """
    install()
    return replace_residual(base_spec, config)


def _named(mechanism: str | None) -> DeferredSpec:
    return DeferredSpec(functools.partial(config_from_global_args, mechanism))


residual = _named("residual")
hc = _named("hc")
mhc = _named("mhc")
ihc = _named("ihc")
single_pass_mhc = _named("single_pass_mhc")
attnres = _named("attnres")
block_attnres = _named("block_attnres")
from_flags = _named(None)

# a mechanism from outside this package that the command line names: the host looks names up here
globals().update((name, _named(name)) for name in named_outside(sys.argv))
