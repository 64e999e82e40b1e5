# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mechanisms that read from depth sources: Full and Block AttnRes, and the base of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms.base import LIBRARIES, Mechanism, Place, Reading, Setting
from megatron_residuals.mechanisms.options import option, options_of
from megatron_residuals.mechanisms.sources.metrics import SOURCES
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.traffic import (
    NOTHING,
    SUM_OF_SOURCE,
    Planes,
    final_read,
    one_pass,
    two_phases,
)
from megatron_residuals.pipeline.two_phase import cut_at_blocks, reads_in_two_phases

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from megatron_residuals.config import ResidualConfig
    from megatron_residuals.diagnostics.journal import Journal
    from megatron_residuals.diagnostics.page import Panel
    from megatron_residuals.mechanisms.base import PublicLayout
    from megatron_residuals.mechanisms.sources.module import DepthAttention, DepthHead
    from megatron_residuals.mechanisms.sources.probe import SourceProbe
    from megatron_residuals.modules import SourceState

# Around eight blocks recover most of the gain (Attention Residuals, section 5; Kimi-K3 uses eight).
DEFAULT_NUM_BLOCKS = 8
BLOCK_LENGTH = "block_sublayers"
TWO_PHASE = ("auto", "on", "off")


class Sources(Mechanism):
    """A state of finished sources and a running sum, opened at the embedding.

    By itself every output is a source of its own, a block of one sublayer. Pipelines send only
    sources that the receiver lacks, and the policies ``block`` keep nothing but sources.
    """

    summary = "a function of the outputs of all earlier sublayers"
    recompute = ("mix", "block", "block+layer")

    def depth_map(
        self, config: ResidualConfig, num_layers: int, sublayers_per_layer: int
    ) -> DepthMap:
        """Blocks of one sublayer."""
        return DepthMap(num_layers, 1, sublayers_per_layer)

    def open(self, config: ResidualConfig, embedding: Tensor) -> SourceState:
        """No source finished; the running sum is the embedding."""
        from megatron_residuals.modules import SourceState

        return SourceState((), embedding)

    def options_in(self, record: Mapping[str, Setting]) -> dict[str, Setting]:
        """The record says a block length also where it is no option."""
        options = super().options_in(record)
        if BLOCK_LENGTH not in {each.name for each in options_of(self.options)}:
            options.pop(BLOCK_LENGTH, None)
        return options

    def head_numbers(self, config: ResidualConfig, reading: Reading) -> int | None:
        """None beside the sources."""
        return 0

    def record(self, config: ResidualConfig, depth: DepthMap | None) -> Mapping[str, Setting]:
        """With the block length in sublayers, at most the whole model."""
        record = dict(config.binding_options())
        if depth is not None:
            record.pop("block_layers", None)
            record[BLOCK_LENGTH] = min(depth.block_sublayers, depth.num_sublayers)
        return record


@dataclass(frozen=True)
class AttnResOptions:
    """Options of Full AttnRes."""

    attnres_eps: float = option(1e-6, "eps of the RMS norm of the AttnRes keys", above=0.0)
    two_phase: str = option(
        "auto",
        "read the finished sources once for all sublayers of a block, then merge each with the "
        "running sum: on, off, or auto (where it moves fewer bytes)",
        choices=TWO_PHASE,
        binds=False,
    )
    attnres_heads: int = option(
        1,
        "heads of an AttnRes read: slices of the hidden size with a softmax of their own (MHAR)",
        minimum=1,
        advice="the same weights are another function with other heads: give the saved number",
    )
    attnres_additive: bool = option(
        False,
        "add what is read to the sum of all sources, in place of reading it alone (Delta AttnRes)",
        advice="the same weights are another function: give what was saved",
    )

    @property
    def single_softmax(self) -> bool:
        """Whether reads are those of AttnRes itself, which kernels and two phases are for."""
        return self.attnres_heads == 1 and not self.attnres_additive


@dataclass(frozen=True)
class BlockAttnResOptions(AttnResOptions):
    """Options of Block AttnRes."""

    block_layers: int | None = option(
        None, "AttnRes block length in transformer layers (attention + MLP = 1)", minimum=1
    )
    block_sublayers: int | None = option(
        None,
        "AttnRes block length in sublayers (attention = 1, MLP = 1)",
        minimum=1,
        advice="every sublayer has a query of its own, whatever the length, so the weights can be "
        "taken over if you mean it: --residual-convert-block-length",
    )


class AttnRes(Sources):
    """Full AttnRes (arXiv 2603.15031): Block AttnRes with one sublayer per block."""

    summary = "attention over the outputs of all earlier sublayers"
    options = AttnResOptions
    libraries = LIBRARIES
    kernels = "all; reads by heads, and added to the stream, are PyTorch's"
    metrics = SOURCES

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.weights = "block_attnres"  # the length in the record tells the two apart
        self.prefix = "attnres"

    def faults(self, config: ResidualConfig) -> list[str]:
        """Libraries read for one sublayer at a time, and heads and sums are plain PyTorch's."""
        faults = []
        if not config.single_softmax:
            given = f"attnres_heads={config.attnres_heads}"
            given = "attnres_additive" if config.attnres_additive else given
            if config.kernels not in ("auto", "torch"):
                faults.append(
                    f"kernels is {config.kernels!r}, which has no reads with {given}; use auto"
                )
            if config.two_phase == "on":
                faults.append(f"two_phase is 'on', but {given} reads in one; leave two_phase out")
        elif config.two_phase == "on" and config.kernels in LIBRARIES:
            faults.append(
                f"two_phase is 'on', but kernels={config.kernels!r} reads for one sublayer at a "
                "time; leave two_phase out, or use kernels='auto'"
            )
        return faults

    def two_phase(self, config: ResidualConfig) -> str:
        """The option; ``off`` where a sublayer has to read by itself."""
        choice: str = config.two_phase
        alone = config.kernels in LIBRARIES or not config.single_softmax
        return "off" if alone else choice

    def parts(
        self, config: ResidualConfig, depth: DepthMap | None, sublayers: range
    ) -> Sequence[range]:
        """Cut in front of each block, if any reads its finished sources together."""
        assert depth is not None, "the state has depth sources"
        choice, parts = self.two_phase(config), cut_at_blocks(depth, sublayers)
        together = any(reads_in_two_phases(choice, depth, part.start) for part in parts)
        return parts if together else [sublayers]

    def _phases(self, config: ResidualConfig, reading: Reading) -> tuple[DepthMap, bool, bool]:
        """The depth, whether the sublayer reads in two phases, and whether it opens its block."""
        depth, i = reading.depth, reading.sublayer
        assert depth is not None, "the state has depth sources"
        return depth, reads_in_two_phases(self.two_phase(config), depth, i), depth.opens_block(i)

    def keeps_input(self, config: ResidualConfig, reading: Reading) -> bool:
        """A merge with the running sum keeps its result."""
        _, two_phase, opens = self._phases(config, reading)
        return two_phase and not opens

    def kept_numbers(self, config: ResidualConfig, reading: Reading) -> int:
        """Two for each source read; in two phases three for a merge, and the logits of phase 1.

        Reads by heads, and sums, keep none.
        """
        depth, two_phase, opens = self._phases(config, reading)
        if not config.single_softmax:
            return 0
        if not two_phase:
            return 2 * depth.num_read(reading.sublayer)
        closed = depth.num_sources(reading.sublayer) + opens
        together = self.kept_vectors(config, reading)
        return 3 * (not opens) + (together + 1) * closed * (together > 0)

    def kept_vectors(self, config: ResidualConfig, reading: Reading) -> int:
        """Phase 1 keeps the directions of all sublayers that it reads for."""
        depth, two_phase, opens = self._phases(config, reading)
        i, within = reading.sublayer, reading.within
        if not two_phase or not (opens or i == within.start):
            return 0
        return min(within.stop, depth.block_range(depth.source_of(i)).stop) - i

    def head_numbers(self, config: ResidualConfig, reading: Reading) -> int:
        """Two for each source of the final read, or none."""
        assert reading.depth is not None, "the state has depth sources"
        if not config.single_softmax:
            return 0
        return 2 * reading.depth.num_read(reading.sublayer)

    def build_sublayer(self, config: ResidualConfig, place: Place) -> DepthAttention:
        """A query over the sources."""
        from megatron_residuals.mechanisms.sources.module import DepthAttention

        assert place.depth is not None, "the state has depth sources"
        return DepthAttention(
            place.hidden_size,
            opens_block=place.depth.opens_block(place.sublayer),
            two_phase=reads_in_two_phases(self.two_phase(config), place.depth, place.sublayer),
            eps=config.attnres_eps,
            heads=config.attnres_heads,
            additive=config.attnres_additive,
            kernels=config.kernels,
            device=place.device,
        )

    def planes(
        self, config: ResidualConfig, layout: StageLayout, depth: DepthMap | None, stage: int
    ) -> Planes:
        """The parts of blocks, each as it is read; sums of the sources; the final read."""
        assert depth is not None, "the state has depth sources"
        sublayers, moved = layout.sublayers(stage), NOTHING
        if not sublayers:
            return moved
        for part in cut_at_blocks(depth, sublayers):
            i, opens = part.start, depth.opens_block(part.start)
            together = reads_in_two_phases(self.two_phase(config), depth, i)
            way = two_phases if together else one_pass
            moved = moved.plus(way(depth.num_sources(i) + opens, len(part), opens=opens))
        sources = depth.num_sources(sublayers.stop)
        moved = moved.plus(SUM_OF_SOURCE, sources)
        return moved.plus(final_read(sources), layout.is_last_with_layers(stage))

    def probe(self, config: ResidualConfig, depth: DepthMap | None) -> SourceProbe:
        """The weights over sources."""
        from megatron_residuals.mechanisms.sources.probe import SourceProbe

        return SourceProbe(self, config, depth)

    def panels(self, run: Journal) -> list[Panel]:
        """The weights, what they come to over time, the queries."""
        from megatron_residuals.mechanisms.sources.panels import panels

        return panels(run, self.prefix)

    def public_layout(self) -> PublicLayout:
        """Kimi-K3's."""
        from megatron_residuals.mechanisms.sources import kimi_k3

        return kimi_k3

    def exported(self) -> ModuleType:
        """The reads of one sublayer at a time."""
        from megatron_residuals.mechanisms.sources import exported

        return exported

    def build_head(self, config: ResidualConfig, place: Place) -> DepthHead:
        """The final read."""
        from megatron_residuals.mechanisms.sources.module import DepthHead

        return DepthHead(
            place.hidden_size,
            eps=config.attnres_eps,
            heads=config.attnres_heads,
            additive=config.attnres_additive,
            kernels=config.kernels,
            device=place.device,
        )


class BlockAttnRes(AttnRes):
    """Block AttnRes (arXiv 2603.15031, section 4)."""

    summary = "attention over block sums"
    options = BlockAttnResOptions

    def depth_map(
        self, config: ResidualConfig, num_layers: int, sublayers_per_layer: int
    ) -> DepthMap:
        """Blocks of the given length, or the shortest of whole layers that makes at most eight."""
        if config.block_sublayers is not None:
            return DepthMap(num_layers, config.block_sublayers, sublayers_per_layer)
        layers = config.block_layers or -(-num_layers // DEFAULT_NUM_BLOCKS)
        return DepthMap.from_layers(num_layers, layers, sublayers_per_layer)

    def faults(self, config: ResidualConfig) -> list[str]:
        """A block has one length."""
        faults = super().faults(config)
        if config.block_layers is not None and config.block_sublayers is not None:
            faults.append(
                f"block_layers={config.block_layers} and block_sublayers={config.block_sublayers} "
                "are both given; a block has one length, give one of the two"
            )
        return faults


ATTNRES = AttnRes("attnres")
BLOCK_ATTNRES = BlockAttnRes("block_attnres")
