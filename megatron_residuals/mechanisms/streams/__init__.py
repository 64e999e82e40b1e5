# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hyper-Connections and their constrained forms: n parallel residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_residuals import mixing
from megatron_residuals.depth import DepthMap
from megatron_residuals.mechanisms.base import Mechanism, Place, Reading, Setting
from megatron_residuals.mechanisms.streams.metrics import GATES, MIXING, OF_HC, OF_MHC, STREAMS
from megatron_residuals.mechanisms.streams.options import (
    HcOptions,
    IhcOptions,
    ManifoldOptions,
    MhcOptions,
    StreamOptions,
)
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.traffic import Planes, contraction, streams

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from megatron_residuals.config import ResidualConfig
    from megatron_residuals.diagnostics.journal import Journal
    from megatron_residuals.diagnostics.page import Panel
    from megatron_residuals.mechanisms.base import PublicLayout
    from megatron_residuals.mechanisms.streams.module import (
        ManifoldHyperConnection,
        StreamResidual,
    )
    from megatron_residuals.mechanisms.streams.probe import HcProbe, IdentityProbe, MhcProbe
    from megatron_residuals.modules import ResidualHead, StreamState


class Streams(Mechanism):
    """A state of n streams [..., n, d], opened in the stage of the first layer."""

    summary = "a weighted sum of n streams, mixed by small matrices"
    options: type = StreamOptions
    recompute = ("mix", "group")

    def rows(self, config: ResidualConfig) -> int:
        """n."""
        streams: int = config.streams
        return streams

    def open(self, config: ResidualConfig, embedding: Tensor) -> StreamState:
        """n copies of the embedding."""
        from megatron_residuals.functional import expand_streams
        from megatron_residuals.modules import StreamState

        return StreamState(expand_streams(embedding, config.streams))

    def unpack(self, config: ResidualConfig, payload: Tensor) -> StreamState:
        """Streams from the rows that are their memory."""
        from megatron_residuals.modules import StreamState

        return StreamState.unpack(payload, config.streams)

    def build_head(self, config: ResidualConfig, place: Place) -> ResidualHead[StreamState]:
        """The contraction."""
        from megatron_residuals.mechanisms.streams.module import StreamHead

        return StreamHead(
            place.hidden_size,
            num_streams=config.streams,
            contraction=config.resolved_contraction,
            eps=config.resolved_mhc_eps,
            gate_eps=config.resolved_gate_eps,
            device=place.device,
        )

    def exported(self) -> ModuleType:
        """Streams read and written one sublayer at a time."""
        from megatron_residuals.mechanisms.streams import exported

        return exported

    copies_embedding = True
    keeps_output = True
    single_pass = False
    """Whether reads do without the coefficients of the streams that they read."""

    def planes(
        self, config: ResidualConfig, layout: StageLayout, depth: DepthMap | None, stage: int
    ) -> Planes:
        """Reads and writes of n streams, and the contraction behind the last layer."""
        sublayers = len(layout.sublayers(stage))
        moved = streams(config.streams, sublayers, single_pass=self.single_pass)
        return moved.plus(contraction(config.streams), layout.is_last_with_layers(stage))

    def panels(self, run: Journal) -> list[Panel]:
        """Gains over depth, distance of the streams, matrices."""
        from megatron_residuals.mechanisms.streams.panels import panels

        return panels(run, self.prefix)

    def head_numbers(self, config: ResidualConfig, reading: Reading) -> int | None:
        """The weights of a learned contraction."""
        return config.streams if config.resolved_contraction == "learned" else None

    def record(self, config: ResidualConfig, depth: DepthMap | None) -> Mapping[str, Setting]:
        """With the contraction that ``auto`` stands for."""
        return {**config.binding_options(), "contraction": config.resolved_contraction}


class HyperConnections(Streams):
    """HC (arXiv 2409.19606)."""

    options = HcOptions
    kernels = "reads and writes of streams; coefficients are PyTorch's"
    metrics = (*MIXING, *STREAMS, *OF_HC)

    def probe(self, config: ResidualConfig, depth: DepthMap | None) -> HcProbe:
        """Its coefficients and streams."""
        from megatron_residuals.mechanisms.streams.probe import HcProbe

        return HcProbe(self, config, depth)

    def build_sublayer(self, config: ResidualConfig, place: Place) -> StreamResidual:
        """Static or dynamic matrices."""
        from megatron_residuals.mechanisms.streams.module import HyperConnection

        return HyperConnection(
            place.hidden_size,
            num_streams=config.streams,
            home_stream=place.sublayer % config.streams,
            dynamic=config.hc_dynamic,
            norm=config.hc_norm,
            kernels=config.kernels,
            device=place.device,
        )

    def kept_numbers(self, config: ResidualConfig, reading: Reading) -> int:
        """Gates and mixing matrix; static ones are expanded parameters."""
        n: int = config.streams
        return 2 * n + n * n if config.hc_dynamic else 0

    def rebuilt_numbers(self, config: ResidualConfig, hidden_size: int, *, copies: bool) -> int:
        """The graph of dynamic coefficients, which normalises the streams."""
        n: int = config.streams
        return n * hidden_size * (1 + copies) + n * (n + 4) if config.hc_dynamic else 0


class GatedStreams(Streams):
    """Coefficients from one projection of all streams together, through sigmoids."""

    def coefficients(self, config: ResidualConfig) -> int:
        """K of a token."""
        raise NotImplementedError

    def kept_numbers(self, config: ResidualConfig, reading: Reading) -> int:
        """All coefficients, the projections they come from, and the mean square."""
        return 2 * self.coefficients(config) + 1

    def record(self, config: ResidualConfig, depth: DepthMap | None) -> Mapping[str, Setting]:
        """With the eps that a None stands for."""
        return {**super().record(config, depth), "mhc_eps": config.resolved_mhc_eps}


class ManifoldHyperConnections(GatedStreams):
    """mHC (arXiv 2512.24880) in two conventions, and with two other ways to mix."""

    summary = "the same, mixing constrained to doubly stochastic matrices"
    options: type = MhcOptions
    libraries: tuple[str, ...] = ("liger",)
    kernels = "all, up to four streams; coefficients of more, or of permutations, are PyTorch's"
    metrics = (*MIXING, *STREAMS, *GATES, *OF_MHC)

    def probe(self, config: ResidualConfig, depth: DepthMap | None) -> MhcProbe:
        """Its coefficients and streams."""
        from megatron_residuals.mechanisms.streams.probe import MhcProbe

        return MhcProbe(self, config, depth)

    def coefficients(self, config: ResidualConfig) -> int:
        """Gates and the logits of the mixing matrix."""
        n: int = config.streams
        return 2 * n + mixing.num_logits(config.mhc_mixing, n)

    def kept_numbers(self, config: ResidualConfig, reading: Reading) -> int:
        """Gates and mixing matrix, the projections they come from, and the mean square."""
        n: int = config.streams
        return 2 * n + n * n + self.coefficients(config) + 1

    def faults(self, config: ResidualConfig) -> list[str]:
        """Sums of permutations have one convention, and are of few streams."""
        faults = super().faults(config)
        if config.mhc_mixing != "sinkhorn" and config.mhc_convention != "paper":
            faults.append(
                f"mhc_mixing is {config.mhc_mixing!r}, which has no eps and no transposed form; "
                "leave mhc_convention out"
            )
        if (fault := mixing.fault(config.mhc_mixing, config.streams)) is not None:
            faults.append(fault)
        return faults

    def build_sublayer(self, config: ResidualConfig, place: Place) -> StreamResidual:
        """Gates and a doubly stochastic matrix."""
        from megatron_residuals.mechanisms.streams import module

        return self._sublayer(module.ManifoldHyperConnection, config, place, place.sublayer)

    def _sublayer(
        self,
        kind: type[ManifoldHyperConnection],
        config: ResidualConfig,
        place: Place,
        home_stream: int,
    ) -> StreamResidual:
        from megatron_residuals import functional

        plain = config.mhc_mixing == "sinkhorn"
        return kind(
            place.hidden_size,
            num_streams=config.streams,
            home_stream=home_stream % config.streams,
            options=functional.MhcOptions(
                config.mhc_convention if plain else config.mhc_mixing,
                config.mhc_sinkhorn_iterations,
                config.resolved_mhc_eps,
            ),
            alpha_init=config.mhc_alpha_init,
            initialisation=config.mhc_init,
            kernels=config.kernels,
            device=place.device,
        )

    def public_layout(self) -> PublicLayout:
        """DeepSeek-V4's."""
        from megatron_residuals.mechanisms.streams.public import DEEPSEEK_V4

        return DEEPSEEK_V4

    def kernel_fault(self, config: ResidualConfig) -> str | None:
        """Liger has four streams and DeepSeek's convention."""
        from megatron_residuals.kernels.streams import liger

        without = super().kernel_fault(config)
        return without or liger.fault(config.streams, config.mhc_convention)


class IdentityHyperConnections(GatedStreams):
    """iHC: mHC without mixing (an ablation of mHC, arXiv 2512.24880; Hy4)."""

    summary = "a gated sum of n streams, which are not mixed"
    options = IhcOptions
    kernels = "all, up to four streams; coefficients of more are PyTorch's"
    metrics = (*STREAMS, *GATES)

    def probe(self, config: ResidualConfig, depth: DepthMap | None) -> IdentityProbe:
        """Its gates and streams."""
        from megatron_residuals.mechanisms.streams.probe import IdentityProbe

        return IdentityProbe(self, config, depth)

    def coefficients(self, config: ResidualConfig) -> int:
        """Gates alone."""
        n: int = config.streams
        return 2 * n

    def build_sublayer(self, config: ResidualConfig, place: Place) -> StreamResidual:
        """Gates."""
        from megatron_residuals import functional
        from megatron_residuals.mechanisms.streams.module import IdentityHyperConnection

        return IdentityHyperConnection(
            place.hidden_size,
            num_streams=config.streams,
            home_stream=place.sublayer % config.streams,
            options=functional.MhcOptions(
                "identity", 0, config.resolved_mhc_eps, config.ihc_gate_eps
            ),
            alpha_init=config.mhc_alpha_init,
            initialisation=config.mhc_init,
            kernels=config.kernels,
            device=place.device,
        )

    def public_layout(self) -> PublicLayout:
        """Hy4's."""
        from megatron_residuals.mechanisms.streams.public import HY4

        return HY4


class SinglePassHyperConnections(ManifoldHyperConnections):
    """Single-Pass mHC (DeepSeek-V4.1, arXiv 2609.19969)."""

    summary = "mHC's sum with weights that the sublayer before has predicted"
    options = ManifoldOptions
    libraries = ()
    single_pass = True

    def numbers(self, config: ResidualConfig) -> int:
        """The weights of the next read."""
        streams: int = config.streams
        return streams

    def open(self, config: ResidualConfig, embedding: Tensor) -> StreamState:
        """n copies of the embedding, of which the first is read."""
        from megatron_residuals.functional.precision import wide_dtype

        state = super().open(config, embedding)
        shape = state.streams.shape[:-1]
        reads = embedding.new_zeros(shape, dtype=wide_dtype(embedding))
        reads[..., 0] = 1.0
        return state._replace(reads=reads)

    def unpack(self, config: ResidualConfig, payload: Tensor) -> StreamState:
        """Streams, and the weights behind them."""
        from megatron_residuals.modules import StreamState

        return StreamState.unpack_with_reads(payload, config.streams)

    def build_sublayer(self, config: ResidualConfig, place: Place) -> StreamResidual:
        """Gates, of which those for reading are the next sublayer's, and a matrix."""
        from megatron_residuals.mechanisms.streams import module

        return self._sublayer(module.SinglePassHyperConnection, config, place, place.sublayer + 1)

    def build_head(self, config: ResidualConfig, place: Place) -> ResidualHead[StreamState]:
        """The last sublayer's weights."""
        from megatron_residuals.mechanisms.streams.module import SinglePassHead

        return SinglePassHead(config.kernels)

    def head_numbers(self, config: ResidualConfig, reading: Reading) -> int | None:
        """The weights."""
        streams: int = config.streams
        return streams

    def record(self, config: ResidualConfig, depth: DepthMap | None) -> Mapping[str, Setting]:
        """With the eps that a None stands for."""
        return {**config.binding_options(), "mhc_eps": config.resolved_mhc_eps}

    def public_layout(self) -> PublicLayout:
        """DeepSeek-V4.1's."""
        from megatron_residuals.mechanisms.streams.public import DEEPSEEK_V41

        return DEEPSEEK_V41


HC = HyperConnections("hc")
MHC = ManifoldHyperConnections("mhc")
IHC = IdentityHyperConnections("ihc")
SINGLE_PASS_MHC = SinglePassHyperConnections("single_pass_mhc")
