# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A boundary of two mHC sublayers with asymmetric inputs, its reference and its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.functional import MhcOptions, MhcWeights, StreamRead, StreamUpdate
from tests.functional.loops import random_tensors

ACTIVATIONS = 2  # of the inputs, in the model's dtype: streams and output
Values = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class BoundaryCase:
    """Inputs in float64: streams, output, h_post, h_res, mapping, bias, alpha, and perhaps reads.

    Attributes:
        updates: whether there is a write; without one, output, h_post and h_res have no part in it,
            nor has h_res where streams are not mixed.
        reads: whether the weights of the read are given, so that h_pre is for the next one.
    """

    n: int
    d: int
    lead: tuple[int, ...]
    convention: str = "paper"
    updates: bool = True
    iterations: int = 5
    eps: float = 1e-2
    gate_eps: float | None = None
    reads: bool = False

    def __str__(self) -> str:
        kind = "boundary" if self.updates else "first read"
        kind = f"single-pass {kind}" if self.reads else kind
        return f"{kind} {self.convention} n={self.n} d={self.d} {self.lead}"

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Detached inputs: activations in a dtype, the rest in float32 at least."""
        draw, n, d = random_tensors(100 * self.n + self.d), self.n, self.d
        sizes = torch.arange(1.0, n + 1, dtype=torch.float64).unsqueeze(-1)
        alpha = torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64)
        parts = self.options.sizes(n)
        columns = sum(parts)
        inputs = [draw(*self.lead, n, d) * sizes, 3 * draw(*self.lead, d)]
        inputs += [draw(*self.lead, n), draw(*self.lead, n, n)]
        inputs += [draw(columns, n * d) / d**0.5, draw(columns)]
        inputs += [alpha[: len(parts)]]
        inputs += [draw(*self.lead, n)] * self.reads
        wide = torch.promote_types(dtype, torch.float32)
        return [x.to(dtype if i < ACTIVATIONS else wide) for i, x in enumerate(inputs)]

    def run(self, *tensors: Tensor, backend: str = "torch") -> StreamRead:
        """The kernel."""
        before, weights, reads = self._arguments(tensors)
        return kernels.update_and_read(before, weights, self.options, reads, backend=backend)

    def reference(self, *tensors: Tensor) -> StreamRead:
        """The specification."""
        before, weights, reads = self._arguments(tensors)
        return functional.update_and_read(before, weights, self.options, reads)

    def rounding_reference(self, dtype: torch.dtype) -> Callable[..., StreamRead]:
        """The specification in float64, but for streams that are rounded to a dtype once written.

        The rounding counts as the identity in its gradient.
        """

        def compute(*tensors: Tensor) -> StreamRead:
            streams, weights, reads = self._arguments(tensors)
            if isinstance(streams, StreamUpdate):
                written = functional.write_streams(streams)
                streams = written + (written.to(dtype).double() - written).detach()
            return functional.update_and_read(streams, weights, self.options, reads)

        return compute

    def gradients(
        self, function: Callable[..., StreamRead], tensors: list[Tensor], dtype: torch.dtype
    ) -> tuple[Values, list[Tensor | None]]:
        """Streams, x, h_post, h_res, h_pre; and the gradients for random cotangents of a dtype."""
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        found = function(*leaves)
        values = self.trained(found)
        torch.autograd.backward(values, self.cotangents(values, dtype))
        detached = tuple(value.detach() for value in (*values, found.h_pre))
        return detached, [leaf.grad for leaf in leaves]

    def trained(self, found: StreamRead) -> Values:
        """What has a gradient, h_res where there is one and h_pre where it is not read with."""
        values = (found.streams, found.x, found.h_post, found.h_res)
        values += (found.h_pre,) * self.reads
        return tuple(value for value in values if value is not None)

    def cotangents(self, values: Values, dtype: torch.dtype) -> list[Tensor]:
        """Random, rounded as they are where activations have the dtype."""
        draw = random_tensors(77)
        wide = torch.promote_types(dtype, torch.float32)
        return [
            draw(*value.shape).to(dtype if i < ACTIVATIONS else wide).to(value.dtype)
            for i, value in enumerate(values)
        ]

    @property
    def options(self) -> MhcOptions:
        return MhcOptions(self.convention, self.iterations, self.eps, self.gate_eps)

    def _arguments(
        self, tensors: tuple[Tensor, ...]
    ) -> tuple[StreamUpdate | Tensor, MhcWeights, Tensor | None]:
        update = StreamUpdate(*tensors[: 4 if self.options.mixes else 3])
        before = update if self.updates else tensors[0]
        return before, MhcWeights(*tensors[4:7]), tensors[7] if self.reads else None


def largest_error(actual: object, exact: object) -> float:
    """The largest difference of two tensors, relative to the largest number of the second."""
    assert isinstance(exact, Tensor) and isinstance(actual, Tensor)
    assert actual.shape == exact.shape
    if exact.numel() == 0:
        return 0.0
    difference = (actual.double() - exact.double()).abs().max()
    return float(difference / exact.double().abs().max().clamp_min(1e-30))


def errors(actual: list[Tensor | None], exact: list[Tensor | None]) -> list[float]:
    """``largest_error`` of each pair; gradients that neither has do not count."""
    pairs = zip(actual, exact, strict=True)
    return [largest_error(a, b) for a, b in pairs if not (a is None and b is None)]
