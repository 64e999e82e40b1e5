# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The edge of a stage: payload and held sources in, payload and stashed sources out.

All effects of the transport are here; between ``enter`` and ``exit`` a stage is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_residuals.mcore.route import Route
from megatron_residuals.modules import ResidualState, SourceState
from megatron_residuals.pipeline.plan import Boundary
from megatron_residuals.transport.source_cache import SourceCache


@dataclass
class Visit:
    """One micro-batch in one stage: its index in the step, and what entering leaves for exiting."""

    micro_batch: int
    source_ids: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)


class StageIO:
    """Packs and unpacks the state of one stage according to the plan.

    A payload is one [rows * s, b, h] tensor: the hidden state of a plain residual; the memory of
    n streams [s, b, n, h], seen as rows; or sources one after the other, the running one last.
    Before the state is opened, and after it is closed, the payload is one row, the hidden state.

    Attributes:
        opens, closes: whether the embedding becomes the state here, and the state the hidden state.
        receives: whether the payload in is a state rather than a hidden state.
    """

    def __init__(self, route: Route, stage: int) -> None:
        self.route, self._plan, self.stage = route, route.plan, stage
        plan, layout = route.plan, route.plan.layout
        self.layers_before, self.num_layers = layout.first_layer(stage), layout.layers[stage]
        self.receives, self.opens = plan.receives(stage), plan.opens(stage)
        self.closes = plan.closes(stage)

    def begin(self) -> Visit:
        """Start a forward pass of this stage."""
        return Visit(self.route.next_micro_batch(self.stage))

    def hidden_row(self, payload: Tensor) -> Tensor:
        """One [s, b, h] row, from which the host reads the sequence length.

        Raises:
            RuntimeError: the payload cannot be the one that the plan announces.
        """
        sequence = self.route.sequence_of(self.stage, payload)
        if sequence is None:
            rows = self._plan.rows_in(self.stage)
            raise RuntimeError(
                f"stage {self.stage} received {tuple(payload.shape)}, which is not {rows} rows of "
                "[s, b, h]; the sender has another plan, or sent it through a communicator that is "
                "not ResidualP2PCommunicator"
            )
        return payload[:sequence]

    def enter(self, payload: Tensor, visit: Visit) -> ResidualState:
        """The state before the first layer of this stage (or of the next one that has any)."""
        residual = self.route.residual
        if self._plan.depth is None:
            return residual.entry.unpack(residual, payload)
        return self._enter_sources(payload.chunk(self._plan.rows_in(self.stage)), visit)

    def exit(self, state: ResidualState, visit: Visit) -> Tensor:
        """The payload for the next stage."""
        if isinstance(state, SourceState):
            return self._exit_sources(state, visit)
        return state.pack()

    def _enter_sources(self, rows: Sequence[Tensor], visit: Visit) -> SourceState:
        boundary = self._plan.boundary_into(self.stage)
        assert boundary is not None, "the first stage receives nothing"
        *arrived, partial = rows
        sources = dict(zip(boundary.sent, arrived, strict=True))
        self._stash(self._plan.stash_on_entry(self.stage), sources, boundary, partial, visit)
        for source in boundary.held:
            sources[source] = self.route.step.cache.fetch(visit.micro_batch, source)
        visit.source_ids = tuple(sorted(sources))
        return SourceState.of([sources[source] for source in visit.source_ids], partial)

    def _exit_sources(self, state: SourceState, visit: Visit) -> Tensor:
        boundary = self._plan.boundary_into(self.stage + 1)
        assert boundary is not None, "only stage 0 has no hop into it"
        # behind a layer all sources are there and a source's id is its position
        ids = range(len(state.sources)) if self.num_layers else visit.source_ids
        sources = dict(zip(ids, state.outgoing, strict=True))
        self._stash(self._plan.stash_on_exit(self.stage), sources, boundary, state.partial, visit)
        rows = [sources[source] for source in boundary.sent] + [state.partial]
        returns = _Returns(self.route.step.cache, visit.micro_batch, tuple(visit.kept))
        payload: Tensor = _Pack.apply(returns, len(rows), *rows, *visit.kept.values())
        return payload

    def _stash(
        self,
        stashed: Sequence[int],
        sources: Mapping[int, Tensor],
        boundary: Boundary,
        partial: Tensor,
        visit: Visit,
    ) -> None:
        for source in stashed:
            value = partial if source == boundary.partial else sources[source]
            fetches = self._plan.expected_deposits(self.stage, source)
            if self.route.step.cache.stash(visit.micro_batch, source, value, fetches=fetches):
                visit.kept[source] = value


class _Returns:
    """The gradients that a stage collects when its backward begins."""

    def __init__(self, cache: SourceCache, micro_batch: int, sources: tuple[int, ...]) -> None:
        self.cache, self.micro_batch, self.sources = cache, micro_batch, sources

    def collect(self) -> list[Tensor]:
        return [self.cache.collect(self.micro_batch, source) for source in self.sources]


class _Pack(torch.autograd.Function):
    """Rows into one payload; in backward, the rows' gradients and those of the kept sources.

    The payload is the root of the stage's backward, which therefore begins by collecting what the
    rank's later stages deposited for the sources this stage keeps.
    """

    @staticmethod
    def forward(ctx: Any, returns: _Returns, num_rows: int, *tensors: Tensor) -> Tensor:
        """Concatenate the first num_rows tensors along the sequence."""
        ctx.returns, ctx.num_rows = returns, num_rows
        return torch.cat(tensors[:num_rows])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Split the payload's gradient; append the collected ones."""
        return (None, None, *gradient.chunk(ctx.num_rows), *ctx.returns.collect())


def fresh(payload: Tensor) -> Tensor:
    """The payload as a tensor that is no view, as the schedules demand of what a stage returns."""
    viewless: Tensor = make_viewless_tensor(inp=payload, requires_grad=True, keep_graph=True)
    return viewless
