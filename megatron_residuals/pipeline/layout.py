# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""How the layers of a model are cut into pipeline stages, as Megatron-Core cuts them.

A stage is one rank and one virtual chunk of it, numbered in the order a micro-batch meets them:

    P=2, V=2      rank 0    rank 1
    chunk 0      stage 0   stage 1
    chunk 1      stage 2   stage 3       stage = chunk * P + rank

Layers are what the host counts and places. Sublayers, numbered through the model from 0, are what
reads and writes the residual state; how many a layer has, of which kinds, is data of the layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from megatron_residuals.text import count_faults, raise_faults

ATTENTION, MLP = "attention", "mlp"
GPT_LAYER = (ATTENTION, MLP)
"""The kinds of a GPT layer's sublayers, in order: the only place that says what such a layer is."""


def gpt_sublayers(num_layers: int) -> range:
    """The sublayers of a model of GPT layers throughout."""
    return range(num_layers * len(GPT_LAYER))


def gpt_place(sublayer: int) -> tuple[int, int]:
    """Of such a model: the layer of a sublayer, and its position in the layer."""
    return divmod(sublayer, len(GPT_LAYER))


Places: TypeAlias = Sequence[tuple[int, str]]
"""Of every sublayer of a model in order: its layer, and its kind."""


def gpt_places(num_layers: int) -> Places:
    """The sublayers of a model of GPT layers throughout."""
    return places_of([GPT_LAYER] * num_layers)


def places_of(layer_kinds: Iterable[Iterable[str]]) -> Places:
    """The sublayers of a model whose layers have sublayers of these kinds."""
    return tuple((layer, kind) for layer, kinds in enumerate(layer_kinds) for kind in kinds)


_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_SINGLE = re.compile(r"(.)\*(\d+)")


@dataclass(frozen=True)
class StageLayout:
    """Layers of every stage, in stage order; a stage may be empty.

    ``layer_kinds`` has the kinds of each layer's sublayers, at least one; None, which is what
    GPT layers throughout become, means `GPT_LAYER` for every layer.

    Raises:
        ValueError: counts out of range, not one entry per stage, or not the kinds of every layer
            (all faults in one message).
    """

    num_ranks: int
    num_chunks: int
    layers: tuple[int, ...]
    layer_kinds: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.layer_kinds is not None:
            object.__setattr__(self, "layer_kinds", tuple(map(tuple, self.layer_kinds)))
        faults = count_faults(1, num_ranks=self.num_ranks, num_chunks=self.num_chunks)
        faults += count_faults(0, **{f"layers[{g}]": n for g, n in enumerate(self.layers)})
        if not faults:
            faults += self._shape_faults()
        raise_faults("StageLayout", faults)
        if self.layer_kinds == (GPT_LAYER,) * self.num_layers:
            object.__setattr__(self, "layer_kinds", None)

    def _shape_faults(self) -> list[str]:
        faults = []
        if self.num_ranks == 1 and self.num_chunks > 1:
            faults.append(
                f"{self.num_chunks} virtual chunks on one rank; Megatron-Core interleaves from two "
                "pipeline ranks on. Use one chunk."
            )
        if len(self.layers) != self.num_ranks * self.num_chunks:
            faults.append(
                f"{len(self.layers)} entries in layers; {self.num_ranks} ranks x {self.num_chunks} "
                f"chunks need {self.num_ranks * self.num_chunks}, in stage order."
            )
        if sum(self.layers) == 0:
            faults.append("no stage has a layer; at least one must.")
        if self.layer_kinds is not None:
            faults += self._kind_faults(self.layer_kinds)
        return faults

    def _kind_faults(self, layer_kinds: tuple[tuple[str, ...], ...]) -> list[str]:
        if len(layer_kinds) != self.num_layers:
            return [
                f"{len(layer_kinds)} entries in layer_kinds for {self.num_layers} layers; give one "
                "for each layer."
            ]
        empty = [layer for layer, kinds in enumerate(layer_kinds) if not kinds]
        return [f"layer {layer} has no sublayer; name at least one kind." for layer in empty]

    @property
    def num_stages(self) -> int:
        """Virtual stages of all ranks."""
        return len(self.layers)

    @property
    def num_layers(self) -> int:
        """Layers of all stages."""
        return sum(self.layers)

    def rank(self, g: int) -> int:
        """The pipeline rank that runs stage g."""
        return self._checked(g) % self.num_ranks

    def chunk(self, g: int) -> int:
        """The virtual chunk of its rank that stage g is."""
        return self._checked(g) // self.num_ranks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that `chunk` of `rank` is."""
        if not (0 <= rank < self.num_ranks and 0 <= chunk < self.num_chunks):
            raise ValueError(
                f"rank {rank}, chunk {chunk} is not in a layout of {self.num_ranks} ranks x "
                f"{self.num_chunks} chunks; both count from 0."
            )
        return chunk * self.num_ranks + rank

    def first_layer(self, g: int) -> int:
        """Layers before stage g, which is the global 0-based index of its first layer."""
        return sum(self.layers[: self._checked(g)])

    @property
    def num_sublayers(self) -> int:
        """Sublayers of all stages."""
        return self._starts[-1]

    @property
    def sublayers_per_layer(self) -> int:
        """Sublayers of each layer.

        Raises:
            ValueError: not all layers have as many.
        """
        counts = sorted(set(map(len, self.layer_kinds or (GPT_LAYER,))))
        if len(counts) > 1:
            raise ValueError(
                f"layers of this layout have {counts[0]} to {counts[-1]} sublayers, so nothing can "
                "be counted in layers; count sublayers."
            )
        return counts[0]

    def first_sublayer(self, g: int) -> int:
        """Sublayers before stage g, which is the global 0-based index of its first sublayer."""
        return self._starts[self.first_layer(g)]

    def sublayers(self, g: int) -> range:
        """Global indices of the sublayers of stage g."""
        first = self.first_layer(g)
        return range(self._starts[first], self._starts[first + self.layers[g]])

    def is_last_with_layers(self, g: int) -> bool:
        """Whether stage g has the model's last layer."""
        sublayers = self.sublayers(g)
        return len(sublayers) > 0 and sublayers.stop == self.num_sublayers

    @cached_property
    def places(self) -> Places:
        """The layer and the kind of every sublayer."""
        return places_of(self.layer_kinds or (GPT_LAYER,) * self.num_layers)

    def kind(self, i: int) -> str:
        """What sublayer i is: `ATTENTION`, `MLP`, or another name that the layout was given."""
        return self._place(i)[1]

    def layer_of(self, i: int) -> int:
        """Global index of the layer that sublayer i belongs to."""
        return self._place(i)[0]

    def _place(self, i: int) -> tuple[int, str]:
        if not 0 <= i < self.num_sublayers:
            raise ValueError(f"sublayer is {i}; this layout has 0 to {self.num_sublayers - 1}.")
        return self.places[i]

    def sublayers_of_layer(self, layer: int) -> range:
        """Global indices of the sublayers of a layer."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}; this layout has 0 to {self.num_layers - 1}.")
        return range(self._starts[layer], self._starts[layer + 1])

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first sublayer of every layer, and where the last one ends."""
        kinds = self.layer_kinds or (GPT_LAYER,) * self.num_layers
        return tuple(accumulate(map(len, kinds), initial=0))

    def _checked(self, g: int) -> int:
        if not 0 <= g < self.num_stages:
            raise ValueError(f"stage is {g}; this layout has stages 0 to {self.num_stages - 1}.")
        return g

    @classmethod
    def even(
        cls,
        num_layers: int,
        num_ranks: int,
        num_chunks: int = 1,
        *,
        account_for_embedding: bool = False,
        account_for_loss: bool = False,
    ) -> StageLayout:
        """Equal stages; an accounted embedding or loss takes one layer's place in its stage.

        Source: `get_num_layers_to_build` and the `account_for_*_in_pipeline_split` options of
        Megatron-Core 0.16 to 0.19.
        """
        counts = {"num_layers": num_layers, "num_ranks": num_ranks, "num_chunks": num_chunks}
        raise_faults("StageLayout.even", count_faults(1, **counts))
        slots = num_layers + account_for_embedding + account_for_loss
        num_stages = num_ranks * num_chunks
        if slots % num_stages:
            raise ValueError(
                f"StageLayout.even: {slots} layers (an accounted embedding or loss counts as one) "
                f"do not divide into {num_ranks} ranks x {num_chunks} chunks; use a multiple of "
                f"{num_stages}, first/last stage counts, or a pipeline layout string."
            )
        layers = [slots // num_stages] * num_stages
        layers[0] -= account_for_embedding
        layers[-1] -= account_for_loss
        return cls(num_ranks, num_chunks, tuple(layers))

    @classmethod
    def uneven(
        cls,
        num_layers: int,
        num_ranks: int,
        num_chunks: int = 1,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> StageLayout:
        """`first` (`last`) layers on the first (last) rank, all its chunks together.

        The other ranks share the rest equally. Source: `num_layers_in_first_pipeline_stage` and
        `num_layers_in_last_pipeline_stage` of Megatron-Core 0.16 to 0.19.
        """
        if first is None and last is None:
            return cls.even(num_layers, num_ranks, num_chunks)
        given = {name: n for name, n in (("first", first), ("last", last)) if n is not None}
        counts = {"num_layers": num_layers, "num_ranks": num_ranks, "num_chunks": num_chunks}
        raise_faults("StageLayout.uneven", count_faults(1, **counts, **given))

        middle_ranks = num_ranks - len(given)
        middle_layers = num_layers - sum(given.values())
        per_rank = middle_layers // middle_ranks if middle_ranks > 0 else 0
        faults = [
            f"{name} is {n}, not a multiple of the {num_chunks} chunks of its rank."
            for name, n in given.items()
            if n % num_chunks
        ]
        if middle_ranks < 0 or middle_layers < 0 or bool(middle_layers) != bool(middle_ranks):
            faults.append(
                f"{middle_layers} of {num_layers} layers are left for {middle_ranks} of "
                f"{num_ranks} ranks; both must be positive, or both 0."
            )
        elif per_rank * middle_ranks != middle_layers or per_rank % num_chunks:
            faults.append(
                f"the {middle_layers} layers left do not divide into {middle_ranks} ranks x "
                f"{num_chunks} chunks; change first or last, or use a pipeline layout string."
            )
        elif num_chunks > 1 and len(given) == num_ranks == 2:
            # the host divides by the number of ranks between the two
            faults.append(
                f"first and last are both given for 2 ranks of {num_chunks} chunks, whose layers "
                "the host cannot number; give one of them, or use a pipeline layout string."
            )
        raise_faults("StageLayout.uneven", faults)

        rank_layers = [per_rank] * num_ranks
        if first is not None:
            rank_layers[0] = first
        if last is not None:
            rank_layers[-1] = last
        return cls(num_ranks, num_chunks, tuple(n // num_chunks for n in rank_layers) * num_chunks)

    @classmethod
    def parse(cls, layout: str, num_ranks: int, num_layers: int | None = None) -> StageLayout:
        """The layout that a `--pipeline-model-parallel-layout` string describes.

        `|` ends a stage; `E` is the embedding, `t` a transformer layer, `m` an MTP layer and `L`
        the loss; `t*3` repeats one character, `(tt|)*4` a group without inner brackets; commas are
        decoration. `Et*3|(tt|)*29,m|L` has 32 stages. The number of chunks follows from the number
        of stages. Source: `PipelineParallelLayerLayout` of Megatron-Core 0.16 to 0.19.

        Raises:
            ValueError: what Megatron-Core refuses too, or not `num_layers` layers when given.
        """
        raise_faults("StageLayout.parse", count_faults(1, num_ranks=num_ranks))
        stages = _expand(layout).split("|")
        faults = _layout_faults(stages, num_ranks)
        layers = tuple(stage.count("t") for stage in stages)
        if num_layers is not None and sum(layers) != num_layers:
            faults.append(f"it has {sum(layers)} layers 't', the model has {num_layers}.")
        raise_faults(f"pipeline layout {layout!r}", faults)
        return cls(num_ranks, len(stages) // num_ranks, layers)


def _expand(layout: str) -> str:
    # Groups before single characters, each in one pass: the host reads "t*2*3" and nested groups
    # as faults because what an expansion produced is not expanded again.
    text = layout.replace(",", "")
    for repeat in (_GROUP, _SINGLE):
        text = repeat.sub(lambda match: match[1] * int(match[2]), text)
    return text


def _layout_faults(stages: list[str], num_ranks: int) -> list[str]:
    flat = "".join(stages)
    faults = []
    if unknown := "".join(sorted(set(flat) - set("EtmL"))):
        faults.append(
            f"{unknown!r} is left after expansion; E, t, m, L and | are allowed, repeated as t*3 "
            "or (tt|)*4, groups not nested."
        )
    if len(stages) % num_ranks:
        faults.append(f"{len(stages)} stages do not divide by {num_ranks} pipeline ranks.")
    if not flat.startswith("E") or flat.count("E") != 1:
        faults.append("one embedding 'E' must come first, and no other after it.")
    if not flat.endswith("L") or flat.count("L") != 1:
        faults.append("one loss 'L' must come last, and no other before it.")
    if "t" in flat.partition("m")[2]:
        faults.append("a layer 't' follows an MTP layer 'm'; MTP layers come after all layers.")
    with_mtp = [g for g, stage in enumerate(stages) if "m" in stage]
    if len(with_mtp) > 1 or any(g < len(stages) - num_ranks for g in with_mtp):
        faults.append("MTP layers 'm' must share one stage, in the last chunk of its rank.")
    return faults
