# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names of a residual's parameters in checkpoints, and what the other keys say about the model.

    decoder.layers.<l>.self_attention_residual.<name>    one key for each layer, or
    decoder.layers.self_attention_residual.<name>        all layers stacked along a first axis
    decoder.residual_head.<name>

Depends on the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_residuals.depth import raise_faults

PARTS = ("self_attention_residual", "mlp_residual")  # of one layer, in order
HEAD = "residual_head"
DECODER = "decoder."
# Of several optimizers, as mixture-of-experts models have them, the host numbers the keys.
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_RESIDUAL = re.compile(rf"(?:^|\.)(?:{'|'.join((*PARTS, HEAD))})\.")
_LAYER = re.compile(r"^(?P<prefix>.*?)decoder\.layers\.(?:(?P<layer>\d+)\.)?")
_HIDDEN = ("decoder.final_layernorm.weight", "embedding.word_embeddings.weight")


def is_model_key(key: str) -> bool:
    """Whether a key of a checkpoint is a model's, not the optimizer's."""
    return _OPTIMIZER.match(key) is None


def is_residual_key(key: str) -> bool:
    """Whether a key is of a parameter of a residual (not of the optimizer's state for one)."""
    return is_model_key(key) and is_of_residual(key)


def is_of_residual(key: str) -> bool:
    """Whether a key is of a parameter of a residual, or of the optimizer's state for one."""
    return _RESIDUAL.search(key) is not None


def sublayer_key(sublayer: int, name: str) -> str:
    """Key of a parameter of the sublayer with a global index (0 = first attention)."""
    return f"{DECODER}layers.{sublayer // 2}.{PARTS[sublayer % 2]}.{name}"


def head_key(name: str) -> str:
    """Key of a parameter in front of the final norm."""
    return f"{DECODER}{HEAD}.{name}"


@dataclass(frozen=True)
class ModelShape:
    """What the keys and shapes of a checkpoint say about the model it is of.

    prefix stands in front of every ``decoder.``; stacked says that one key holds all layers.
    """

    num_layers: int
    hidden_size: int
    stacked: bool = False
    prefix: str = ""

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        num_layers: int | None = None,
        hidden_size: int | None = None,
    ) -> ModelShape:
        """Infer the shape from ``{key: shape}``; a size that is given overrules the inferred one.

        Raises:
            ValueError: no decoder layers, layers with gaps or of two kinds, or no hidden size.
        """
        found = [
            (match, shapes[key])
            for key in shapes
            if is_model_key(key) and (match := _LAYER.match(key)) is not None
        ]
        if not found:
            raise ValueError(
                "no key of the form decoder.layers.…; this is not the checkpoint of a "
                "Megatron-Core GPT model"
            )
        faults = []
        prefixes = sorted({match["prefix"] for match, _ in found})
        if len(prefixes) > 1:
            faults.append(f"decoders under several prefixes, {prefixes}; give one model.")
        kinds = {match["layer"] is None for match, _ in found}
        if len(kinds) > 1:
            faults.append("some keys hold one layer each and others all layers; give one form.")
        layers = _num_layers(found, faults) if num_layers is None else num_layers
        hidden = _hidden_size(shapes, prefixes[0]) if hidden_size is None else hidden_size
        if hidden is None:
            keys = " and ".join(_HIDDEN)
            faults.append(f"no hidden size, for lack of {keys}; give --hidden-size.")
        raise_faults("model", faults)
        return cls(layers, hidden or 0, kinds.pop(), prefixes[0])


def _num_layers(found: Sequence[tuple[re.Match[str], Sequence[int]]], faults: list[str]) -> int:
    numbers = {int(match["layer"]) for match, _ in found if match["layer"] is not None}
    if numbers:
        missing = sorted(set(range(max(numbers) + 1)) - numbers)
        if missing:
            faults.append(f"layers {missing} have no keys; this is one pipeline stage of several.")
        return max(numbers) + 1
    lengths = {shape[0] for _, shape in found if len(shape) > 0}
    if len(lengths) != 1:
        faults.append(f"stacked keys of {sorted(lengths)} layers; give --num-layers.")
        return 0
    return lengths.pop()


def _hidden_size(shapes: Mapping[str, Sequence[int]], prefix: str) -> int | None:
    return next((shapes[prefix + key][-1] for key in _HIDDEN if prefix + key in shapes), None)


def missing_keys(wanted: Iterable[str], present: Iterable[str]) -> list[str]:
    """Keys that are wanted and not present, in order; of many, the first eight and a count."""
    there = set(present)
    missing = [key for key in wanted if key not in there]
    more = len(missing) - 8
    return missing if more <= 0 else [*missing[:8], f"and {more} more"]
