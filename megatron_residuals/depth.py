# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Depth as arithmetic: which sublayer opens a block, and what it finds to read.

Numbering. Sublayers are global and 0-based; which layer each belongs to is the layout's business
(`pipeline.layout`). Source 0 is the embedding; source n >= 1 is the sum of the outputs of block n.
At the first sublayer of a block the finished sum is read as the running partial, *then* pushed as
a source, and *then* a fresh partial starts (Block AttnRes, arXiv 2603.15031, eq. 6).
Depends on the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_residuals.text import count_faults, raise_faults, table


def source_names(sources: Iterable[int]) -> str:
    """Names of ascending source ids, runs of three or more shortened: 0, 1, 2, 5 as "s0-s2 s5"."""
    runs: list[list[int]] = []
    for source in sources:
        if runs and source == runs[-1][-1] + 1:
            runs[-1].append(source)
        else:
            runs.append([source])
    words = [
        f"s{run[0]}-s{run[-1]}" if len(run) > 2 else " ".join(f"s{source}" for source in run)
        for run in runs
    ]
    return " ".join(words) or "-"


@dataclass(frozen=True, init=False)
class DepthMap:
    """Blocks of `block_sublayers` sublayers over the `num_sublayers` of a model.

    It is made for a number of layers with equally many sublayers each, by default those of a GPT
    layer; afterwards only sublayers count. The last block may be short. `block_sublayers=1` is Full
    AttnRes; one block as long as the model leaves the embedding as the only source beside the
    running sum.

    Raises:
        ValueError: a count is not an integer of at least 1 (all faults in one message).
    """

    num_sublayers: int
    block_sublayers: int

    def __init__(self, num_layers: int, block_sublayers: int, sublayers_per_layer: int = 2) -> None:
        counts = {
            "num_layers": num_layers,
            "block_sublayers": block_sublayers,
            "sublayers_per_layer": sublayers_per_layer,
        }
        raise_faults("DepthMap", count_faults(1, **counts))
        object.__setattr__(self, "num_sublayers", num_layers * sublayers_per_layer)
        object.__setattr__(self, "block_sublayers", block_sublayers)

    @classmethod
    def from_layers(
        cls, num_layers: int, block_layers: int, sublayers_per_layer: int = 2
    ) -> DepthMap:
        """The map whose blocks are given in whole layers."""
        raise_faults(
            "DepthMap",
            count_faults(1, block_layers=block_layers, sublayers_per_layer=sublayers_per_layer),
        )
        return cls(num_layers, block_layers * sublayers_per_layer, sublayers_per_layer)

    @property
    def num_blocks(self) -> int:
        """N, a short last block included; the embedding is a source but no block."""
        return -(-self.num_sublayers // self.block_sublayers)

    def opens_block(self, i: int) -> bool:
        """Whether sublayer i is the first of its block."""
        self._check(i, self.num_sublayers - 1)
        return i % self.block_sublayers == 0

    def source_of(self, i: int) -> int:
        """The source that the output of sublayer i is summed into."""
        self._check(i, self.num_sublayers - 1)
        return i // self.block_sublayers + 1

    def num_sources(self, i: int) -> int:
        """Completed sources, embedding included, in the state just before sublayer i reads.

        `i == num_sublayers` is the point before the final read. 0 when i is 0, since the embedding
        is then still the partial; else (i - 1) // S + 1.
        """
        self._check(i, self.num_sublayers)
        return 0 if i == 0 else (i - 1) // self.block_sublayers + 1

    def num_read(self, i: int) -> int:
        """What sublayer i (or the final read) attends to: the completed sources and the partial."""
        return self.num_sources(i) + 1

    def partial_id(self, i: int) -> int:
        """Id of the source that the partial is, or will become, just before sublayer i reads."""
        return self.num_sources(i)

    def partial_is_complete(self, i: int) -> bool:
        """Whether nothing more will be added to the partial that sublayer i (or the end) reads."""
        self._check(i, self.num_sublayers)
        return i % self.block_sublayers == 0 or i == self.num_sublayers

    def num_complete(self, i: int) -> int:
        """Sources whose value is final just before sublayer i reads, finished partial included."""
        return self.num_sources(i) + self.partial_is_complete(i)

    def block_range(self, source: int) -> range:
        """The sublayers summed into a source; none for source 0, the embedding."""
        if not 0 <= source <= self.num_blocks:
            raise ValueError(f"source is {source}; this depth has sources 0 to {self.num_blocks}.")
        if source == 0:
            return range(0)
        end = min(source * self.block_sublayers, self.num_sublayers)
        return range((source - 1) * self.block_sublayers, end)

    def _check(self, i: int, last: int) -> None:
        if not 0 <= i <= last:
            raise ValueError(f"sublayer is {i}; this depth allows 0 to {last} here.")

    def _reads(self, i: int) -> str:
        running = "" if self.partial_is_complete(i) else "~"
        return f"{source_names(range(self.num_read(i)))}{running}"

    def __str__(self) -> str:
        """Table of what every sublayer reads; `~` marks a last source that is still growing."""
        rows: list[tuple[str, str, str]] = []
        for source in range(1, self.num_blocks + 1):
            first, *rest = self.block_range(source)
            rows.append((str(first), f"s{source}", self._reads(first)))
            if rest:
                span = f"{rest[0]}-{rest[-1]}" if len(rest) > 1 else str(rest[0])
                rows.append((span, "", self._reads(rest[0])))
        rows.append(("final", "", self._reads(self.num_sublayers)))
        names = ("sublayer", "opens", "reads")
        records = [dict(zip(names, row, strict=True)) for row in rows]
        return "\n".join(table(records, left=("opens", "reads")))
