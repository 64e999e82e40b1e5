# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a mechanism says about itself: the one description that everything else asks.

Standard library only; what needs PyTorch is imported by the methods that build it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from megatron_residuals.depth import DepthMap
from megatron_residuals.diagnostics.metric import Metric
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.traffic import Planes, plain

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch import Tensor

    from megatron_residuals.config import ResidualConfig
    from megatron_residuals.diagnostics.journal import Journal
    from megatron_residuals.diagnostics.page import Panel
    from megatron_residuals.diagnostics.probes import Probe
    from megatron_residuals.modules import ResidualHead, ResidualState, RowState, SublayerResidual

Setting: TypeAlias = str | int | float | bool
LIBRARIES = ("fla", "liger")
"""External libraries that may compute a mechanism."""


class Place(NamedTuple):
    """Where a residual module stands: the global index of its sublayer, over what depth.

    ``depth`` is that of mechanisms with depth sources. hidden_size is d; device None is torch's.
    """

    hidden_size: int
    sublayer: int
    depth: DepthMap | None = None
    device: torch.device | None = None


class Reading(NamedTuple):
    """One sublayer of a stage, as the memory planner asks about it.

    Attributes:
        sublayer: its global index; the number of sublayers for the head.
        within: the sublayers that run together with it, of a stage or of a checkpoint.
        depth: of mechanisms with depth sources.
    """

    sublayer: int
    within: range
    depth: DepthMap | None


class PublicLayout(Protocol):
    """Parameters under the names of released models: a module or an object with these."""

    @property
    def NAME(self) -> str:
        """Of the layout."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Of the models, as their configurations say."""

    @property
    def SAID(self) -> Mapping[str, Setting]:
        """Settings that the names alone say."""

    @property
    def SETTINGS(self) -> Mapping[str, tuple[str, int | float]]:
        """Words of a released configuration: our name, and how many of ours one of theirs is."""

    @property
    def FIXED(self) -> Mapping[str, float]:
        """Words of a released configuration that have one value here."""

    @property
    def matches(self) -> Callable[[str], bool]:
        """Whether a name in a file is one of the parameters here."""

    @property
    def public_config(self) -> Callable[[ResidualConfig, int], dict[str, Setting]]:
        """The options under the names of a released configuration, for a number of layers."""

    @property
    def export_parameters(self) -> Callable[..., dict[str, Tensor]]:
        """(parameters, config, num_layers) -> tensors under public names."""

    @property
    def import_parameters(self) -> Callable[..., dict[str, Tensor]]:
        """(tensors, config, num_layers, hidden_size) -> parameters."""


@dataclass(frozen=True)
class NoOptions:
    """The options of a mechanism that has none."""


class Mechanism:
    """One way to connect sublayers over depth. A mechanism of yours derives from this class.

    The methods below `build_sublayer` have defaults; each says what the default gives up.

    Args:
        name: what ``--residual`` calls it; of one outside this package ``my_module:NAME``.

    Attributes:
        summary: what a sublayer reads, in a few words.
        options: the dataclass of its own options, fields made by ``options.option``; each becomes
            the flag ``--residual-<field>`` and a keyword of ``ResidualConfig``.
        recompute: values of ``--residual-recompute`` that its state can be replayed under, beside
            ``none``.
        weights: mechanisms that name the same here load each other's checkpoints.
        libraries: external libraries that have kernels for it.
        kernels: what of it Triton computes, in words; none where all of it is plain PyTorch.
        prefix: in front of the names of its metrics.
        is_stock: whether it is the host's own residual connection, whose checkpoints hold nothing
            of it.
    """

    summary: str = ""
    options: type = NoOptions
    recompute: tuple[str, ...] = ("mix",)
    libraries: tuple[str, ...] = ()
    kernels: str = ""
    is_stock: bool = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights = name
        self.prefix = name.rpartition(":")[2].lower()

    # the model: these three, and open, are what a mechanism is

    def open(self, config: ResidualConfig, embedding: Tensor) -> ResidualState:
        """The state in front of the first sublayer, from the embedding [..., d]."""
        from megatron_residuals.modules import PlainState

        return PlainState(embedding)

    def build_sublayer(self, config: ResidualConfig, place: Place) -> SublayerResidual[Any, Any]:
        """The module that reads and writes the state at one sublayer."""
        raise NotImplementedError(
            f"{type(self).__name__} has no build_sublayer(config, place), which returns the "
            "SublayerResidual of one sublayer"
        )

    def build_head(self, config: ResidualConfig, place: Place) -> ResidualHead[Any]:
        """The module that closes the state in front of the final norm."""
        from megatron_residuals.mechanisms.plain.module import PlainHead

        return PlainHead()

    # the state between sublayers

    def unpack(self, config: ResidualConfig, payload: Tensor) -> RowState:
        """The state whose ``pack`` gave a payload [rows * s, b, d]; not for depth sources."""
        from megatron_residuals.modules import PlainState

        return PlainState.unpack(payload, self.rows(config))

    def rows(self, config: ResidualConfig) -> int:
        """Rows [s, b, h] of the state between two sublayers, where it has no depth sources."""
        return 1

    def numbers(self, config: ResidualConfig) -> int:
        """float32 (or wider) numbers of every token that ``pack`` puts behind the rows."""
        return 0

    def depth_map(
        self, config: ResidualConfig, num_layers: int, sublayers_per_layer: int
    ) -> DepthMap | None:
        """The depth sources of the state; None where it is a fixed number of rows."""
        return None

    def parts(
        self, config: ResidualConfig, depth: DepthMap | None, sublayers: range
    ) -> Sequence[range]:
        """Consecutive sublayers cut into those that begin together (``SublayerResidual.begin``)."""
        return [sublayers]

    # what is kept between forward and backward, besides the state in front of a sublayer and what
    # the host's norm keeps; numbers are float32 (or wider)

    copies_embedding: bool = False
    """Whether opening makes a storage of its own."""
    keeps_output: bool = False
    """Whether the write keeps the sublayer's output [s, b, h]."""

    def keeps_input(self, config: ResidualConfig, reading: Reading) -> bool:
        """Whether the sublayer's input is kept where the norm does not keep it."""
        return False

    def kept_numbers(self, config: ResidualConfig, reading: Reading) -> int:
        """Numbers per token that a sublayer's read and write keep."""
        return 0

    def kept_vectors(self, config: ResidualConfig, reading: Reading) -> int:
        """Vectors [h] that the read keeps."""
        return 0

    def rebuilt_numbers(self, config: ResidualConfig, hidden_size: int, *, copies: bool) -> int:
        """Numbers per token of a graph of coefficients that backward builds again.

        ``copies``: whether activations have to be copied to float32.
        """
        return 0

    def head_numbers(self, config: ResidualConfig, reading: Reading) -> int | None:
        """Numbers per token that closing keeps beside the state; None if it keeps neither."""
        return None

    # what it moves through memory

    def planes(
        self, config: ResidualConfig, layout: StageLayout, depth: DepthMap | None, stage: int
    ) -> Planes:
        """Planes that the sublayers of a stage move; by default those of the plain residual."""
        return plain(len(layout.sublayers(stage)))

    # what is recorded while it trains

    metrics: tuple[Metric, ...] = ()
    """Its own, beside those that every mechanism has (``diagnostics.catalogue``)."""

    def probe(self, config: ResidualConfig, depth: DepthMap | None) -> Probe | None:
        """What looks at its reads; None where it has no metrics that a read gives."""
        return None

    def panels(self, run: Journal) -> list[Panel] | None:
        """What a report draws of its metrics; None for one panel each."""
        return None

    # outside a run

    def public_layout(self) -> PublicLayout | None:
        """Its names in released models, as ``streams.public`` has them; None for none."""
        return None

    def exported(self) -> ModuleType | None:
        """The module that computes it in an exported model, as ``streams.exported``: its
        ``open_state``, ``Sublayer`` and ``Head``, on torch and ``functional`` alone, and the
        MECHANISMS and OPTIONS that it is for; None where no model with it can be exported.
        """
        return None

    # settings

    def faults(self, config: ResidualConfig) -> list[str]:
        """What is wrong with options that are each valid by themselves."""
        return []

    def record(self, config: ResidualConfig, depth: DepthMap | None) -> Mapping[str, Setting]:
        """The settings that the weights depend on, as a checkpoint remembers them.

        By default every option that binds, under its own name.
        """
        return config.binding_options()

    def options_in(self, record: Mapping[str, Setting]) -> dict[str, Setting]:
        """Inverse of ``record``: options that give a model of those settings."""
        return {name: value for name, value in record.items() if name != "mechanism"}

    def kernel_fault(self, config: ResidualConfig) -> str | None:
        """Why the library that ``--residual-kernels`` names cannot compute it; None if it can."""
        if config.kernels in self.libraries:
            return None
        has = ", ".join(self.libraries) or "none of them"
        return f"has no kernels for {self.name}, for which there are {has}; use auto"
