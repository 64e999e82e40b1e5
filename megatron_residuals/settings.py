# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of a residual that belong to its weights: what a checkpoint says, and comparing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from megatron_residuals.config import MECHANISMS, ResidualConfig, options_for
from megatron_residuals.mechanisms import Setting, mechanism_in_file, mechanism_named
from megatron_residuals.mechanisms.sources import BLOCK_LENGTH

__all__ = [
    "BLOCK_LENGTH",
    "RECORD",
    "Setting",
    "as_record",
    "compare_settings",
    "settings_of",
]

RECORD = "residual_settings"
"""Name of the module, below the decoder, whose extra state is the record in a checkpoint."""


def settings_of(
    config: ResidualConfig, num_layers: int, sublayers_per_layer: int = 2
) -> dict[str, Setting]:
    """The record of a model: every setting its weights depend on, defaults filled in.

    Block lengths are in sublayers (attention = 1, MLP = 1), at most the whole model; Full AttnRes
    has blocks of one.
    """
    return {
        "mechanism": config.mechanism,
        **config.entry.record(config, config.depth_map(num_layers, sublayers_per_layer)),
    }


def as_record(found: object, source: object) -> dict[str, Setting]:
    """A record as it was found in a file, which may hold anything.

    Raises:
        ValueError: it is no record of a known mechanism; names ``source``.
    """
    name = found.get("mechanism") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not (name in MECHANISMS or ":" in str(name)):
        raise ValueError(
            f"{source} has a settings record that names no mechanism; known are "
            f"{', '.join(MECHANISMS)}"
        )
    wrong = [name for name, value in found.items() if not isinstance(value, get_args(Setting))]
    if wrong:
        raise ValueError(
            f"{source} has a settings record whose {wrong[0]!r} is {found[wrong[0]]!r}; settings "
            "are numbers, words, true or false"
        )
    return dict(found)


def compare_settings(
    saved: Mapping[str, Setting] | None,
    given: Mapping[str, Setting],
    *,
    convert_block_length: bool = False,
) -> list[str]:
    """What forbids loading weights saved under one record into a model of another, a line each.

    Args:
        saved: the record of the checkpoint; None for a model with its stock residual connection.
        given: the record of the model (``settings_of``).
        convert_block_length: AttnRes blocks may have another length than they were trained with.

    Returns:
        Lines that name the setting, both values and what to do; none if the weights may be loaded.
    """
    if saved is None:
        return [
            f"the checkpoint is of a model without a residual mechanism, the model has "
            f"{given['mechanism']}; to start from a plain model's weights give --finetune"
        ]
    if _weights(saved) != _weights(given):
        return [_line("mechanism", saved, given)]
    names = [name for name in {**saved, **given} if name != "mechanism"]
    differing = [name for name in names if saved.get(name) != given.get(name)]
    if convert_block_length:
        differing = [name for name in differing if name != BLOCK_LENGTH]
    return [_line(name, saved, given) for name in differing]


def _weights(record: Mapping[str, Setting]) -> Setting:
    """Whose weights they are: mechanisms may share them, and say by their settings who they are."""
    name = record["mechanism"]
    try:
        return mechanism_in_file(str(name)).weights
    except ValueError:  # a mechanism that is not installed here
        return name


def _line(name: str, saved: Mapping[str, Setting], given: Mapping[str, Setting]) -> str:
    def value(record: Mapping[str, Setting]) -> str:
        return repr(record[name]) if name in record else "nothing (another version)"

    return f"{name}: saved {value(saved)}, given {value(given)}; {_advice(name, given)}"


def _advice(name: str, given: Mapping[str, Setting]) -> str:
    if name == "mechanism":
        return "a checkpoint of one mechanism means nothing to another: give the saved one"
    known = options_for(mechanism_named(str(given["mechanism"])))
    return next((each.advice for each in known if each.name == name), "give the saved value")
