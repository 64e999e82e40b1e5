# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names of a residual's parameters in checkpoints, and what the other keys say about the model.

    decoder.layers.<l>.self_attention_residual.<name>    one key for each layer, or
    decoder.layers.self_attention_residual.<name>        all layers stacked along a first axis
    …mlp_residual…, …mixer_residual…                     of an MLP, of a Mamba mixer
    decoder.residual_head.<name>

Depends on the standard library only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_residuals.pipeline.layout import gpt_place
from megatron_residuals.text import count_faults, first_few, raise_faults

PARTS = ("self_attention_residual", "mlp_residual")  # of one GPT layer, in order
MIXER = "mixer_residual"  # of a Mamba layer
HEAD = "residual_head"
HYBRID_NORM = "final_norm"  # of a GPT: final_layernorm
DECODER = "decoder."
# Of several optimizers, as mixture-of-experts models have them, the host numbers the keys.
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_RESIDUAL = re.compile(rf"(?:^|\.)(?:{'|'.join((*PARTS, MIXER, HEAD))})\.")
_LAYER = re.compile(r"^(?P<prefix>.*?)decoder\.layers\.(?:(?P<layer>[0-9]{1,18})\.)?")
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
    layer, position = gpt_place(sublayer)
    return f"{DECODER}layers.{layer}.{PARTS[position]}.{name}"


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
        source: object = "model",
    ) -> ModelShape:
        """Infer the shape from ``{key: shape}``; a size that is given overrules the inferred one.

        Args:
            source: what the keys are of, for errors.

        Raises:
            ValueError: no decoder layers, layers with gaps or of two kinds, no hidden size, or a
                hybrid model, whose keys do not tell its layers.
        """
        found = [
            (match, shapes[key])
            for key in shapes
            if is_model_key(key) and (match := _LAYER.match(key)) is not None
        ]
        if not found:
            raise ValueError(
                f"{source}: no key of the form decoder.layers.…; this is not the checkpoint of a "
                "Megatron-Core GPT model"
            )
        if any(f"{DECODER}{HYBRID_NORM}." in key for key in shapes):
            raise ValueError(
                f"{source}: {DECODER}{HYBRID_NORM} is of a hybrid model, and only GPTs are "
                "converted; start from its weights with --finetune instead"
            )
        given = {"--num-layers": num_layers, "--hidden-size": hidden_size}
        faults = count_faults(1, **{k: size for k, size in given.items() if size is not None})
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
        raise_faults(str(source), faults)
        return cls(layers, hidden or 0, kinds.pop(), prefixes[0])


def _num_layers(found: Sequence[tuple[re.Match[str], Sequence[int]]], faults: list[str]) -> int:
    numbers = {int(match["layer"]) for match, _ in found if match["layer"] is not None}
    if numbers:
        # a key may name any layer: nothing as long as the largest number is made
        missing = max(numbers) + 1 - len(numbers)
        if missing:
            gaps = (layer for layer in itertools.count() if layer not in numbers)
            first = ", ".join(map(str, itertools.islice(gaps, min(missing, 8))))
            more = f" and {missing - 8:,} more" if missing > 8 else ""
            faults.append(
                f"layers [{first}]{more} have no keys; this is one pipeline stage of several."
            )
        return len(numbers)
    lengths = {shape[0] for _, shape in found if math.prod(shape) > 0 and len(shape) > 0}
    if len(lengths) != 1:
        faults.append(f"stacked keys of {sorted(lengths)} layers; give --num-layers.")
        return 0
    return lengths.pop()


def _hidden_size(shapes: Mapping[str, Sequence[int]], prefix: str) -> int | None:
    known = (shapes[prefix + key] for key in _HIDDEN if prefix + key in shapes)
    return next((shape[-1] for shape in known if math.prod(shape) > 0 and len(shape) > 0), None)


def missing_keys(wanted: Iterable[str], present: Iterable[str]) -> list[str]:
    """Keys that are wanted and not present, in order; of many, the first eight and a count."""
    there = set(present)
    return first_few([key for key in wanted if key not in there])


def shape_faults(
    found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> list[str]:
    """A line for every parameter that is missing, too many, or of another shape; at most eight."""
    faults = [f"{name} is missing." for name in wanted if name not in found]
    faults += [
        f"{name} is not of this model (more layers?)." for name in found if name not in wanted
    ]
    faults += [
        f"{name} has shape {list(found[name])}; this model's is {list(shape)}."
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return first_few(faults)
