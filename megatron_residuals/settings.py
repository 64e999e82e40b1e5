# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of a residual that belong to its weights: what a checkpoint says, and comparing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, get_args

from megatron_residuals.config import MECHANISMS, SOURCE_MECHANISMS, ResidualConfig

Setting: TypeAlias = str | int | float | bool

RECORD = "residual_settings"
"""Name of the module, below the decoder, whose extra state is the record in a checkpoint."""

# Fields of ResidualConfig that a checkpoint does not bind: how the same function is computed, and
# the initial values, which loading overwrites.
FREE = frozenset(
    {
        "transport",
        "recompute",
        "kernels",
        "two_phase",
        "check_messages",
        "log_interval",
        "log_image_interval",
        "mhc_alpha_init",
        "mhc_init",
    }
)

# Fields that the record keeps in another form, since their meaning depends on the model's depth,
# the mechanism or the convention.
RESOLVED = {
    "contraction": "contraction",
    "mhc_eps": "mhc_eps",
    "block_layers": "block_sublayers",
    "block_sublayers": "block_sublayers",
}
BLOCK_LENGTH = "block_sublayers"

_WHAT_TO_DO = {
    "mechanism": "a checkpoint of one mechanism means nothing to another: give the saved one",
    "streams": "weights of another number of streams do not fit: give the saved number",
    "mhc_convention": "the same weights are another function under the other convention: give the "
    "saved one",
    BLOCK_LENGTH: "every sublayer has a query of its own, whatever the length, so the weights can "
    "be taken over if you mean it: --residual-convert-block-length",
}


def settings_of(config: ResidualConfig, num_layers: int) -> dict[str, Setting]:
    """The record of a model: every setting its weights depend on, defaults filled in.

    Block lengths are in sublayers (attention = 1, MLP = 1), at most the whole model; Full AttnRes
    has blocks of one.
    """
    record: dict[str, Setting] = {"mechanism": config.mechanism}
    for name, field in ResidualConfig.__dataclass_fields__.items():
        if config.mechanism in field.metadata["applies"] and name not in FREE | RESOLVED.keys():
            record[name] = getattr(config, name)
    if config.is_streams:
        record["contraction"] = config.resolved_contraction
    if config.mechanism == "mhc":
        record["mhc_eps"] = config.resolved_mhc_eps
    depth = config.depth_map(num_layers)
    if depth is not None:
        record[BLOCK_LENGTH] = min(depth.block_sublayers, depth.num_sublayers)
    return record


def as_record(found: object, source: object) -> dict[str, Setting]:
    """A record as it was found in a file, which may hold anything.

    Raises:
        ValueError: it is no record of a known mechanism; names ``source``.
    """
    if not isinstance(found, Mapping) or found.get("mechanism") not in MECHANISMS:
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
    if _family(saved) != _family(given):
        return [_line("mechanism", saved, given)]
    names = [name for name in {**saved, **given} if name != "mechanism"]
    differing = [name for name in names if saved.get(name) != given.get(name)]
    if convert_block_length:
        differing = [name for name in differing if name != BLOCK_LENGTH]
    return [_line(name, saved, given) for name in differing]


def _family(record: Mapping[str, Setting]) -> Setting:
    """Full AttnRes is Block AttnRes with blocks of one sublayer; the length tells them apart."""
    mechanism = record["mechanism"]
    return "block_attnres" if mechanism in SOURCE_MECHANISMS else mechanism


def _line(name: str, saved: Mapping[str, Setting], given: Mapping[str, Setting]) -> str:
    def value(record: Mapping[str, Setting]) -> str:
        return repr(record[name]) if name in record else "nothing (another version)"

    advice = _WHAT_TO_DO.get(name, "give the saved value")
    return f"{name}: saved {value(saved)}, given {value(given)}; {advice}"
