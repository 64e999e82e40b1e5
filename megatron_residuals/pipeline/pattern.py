# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layer pattern of a hybrid model, as Megatron-Core reads it.

A letter is a layer, and each of these layers is one sublayer; `|` ends a stage, and layers of
multi-token prediction follow a `/`: `M*-M|*-E/*-` has seven layers in two stages.
"""

from __future__ import annotations

import dataclasses

from megatron_residuals.pipeline.layout import ATTENTION, MLP, StageLayout
from megatron_residuals.text import raise_faults

KINDS = {
    "M": "mamba",
    "G": "gdn",
    "*": ATTENTION,
    "D": "dsa",
    "+": "mla",
    "-": MLP,
    "E": "moe",
}
"""The kind of a sublayer by the symbol of its layer; the host's stacks have ``<kind>_layer``."""
STAGE_END, PREDICTION = "|", "/"


def pattern_layout(
    pattern: str, num_ranks: int, *, first: int | None = None, last: int | None = None
) -> StageLayout:
    """The stages that ``--hybrid-layer-pattern`` describes; what is behind ``/`` is no layer of it.

    With ``|`` there is one stage for each part, of which some may be empty. Without, the ranks
    share the layers equally but for ``first`` (``last``) on the first (last) rank. Source:
    `select_pipeline_segment` of Megatron-Core 0.17 to 0.19.

    Raises:
        ValueError: what the host refuses too: a letter it does not know, parts that do not divide
            over the ranks, layers that do not.
    """
    decoder = pattern.partition(PREDICTION)[0]
    symbols, parts = decoder.replace(STAGE_END, ""), decoder.split(STAGE_END)
    unknown = "".join(sorted(set(symbols) - KINDS.keys()))
    faults = [f"{unknown!r} is no layer; known are {' '.join(KINDS)}."] if unknown else []
    if len(parts) > 1:
        if (first, last) != (None, None):
            faults.append("counts of the first or last stage beside '|', which ends stages itself.")
        if len(parts) % num_ranks:
            faults.append(f"{len(parts)} stages do not divide by {num_ranks} pipeline ranks.")
    raise_faults(f"hybrid pattern {pattern!r}", faults)
    if len(parts) == 1:
        layout = StageLayout.uneven(len(symbols), num_ranks, first=first, last=last)
    else:
        layout = StageLayout(num_ranks, len(parts) // num_ranks, tuple(map(len, parts)))
    return dataclasses.replace(layout, layer_kinds=tuple((KINDS[each],) for each in symbols))
