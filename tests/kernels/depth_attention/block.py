# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""One block of Block AttnRes as a function of flat tensors, read in one phase or in two."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from tests.functional.loops import random_tensors

EPS = 1e-2  # large, so that a misplaced eps shows


@dataclasses.dataclass
class Block:
    """Finished sources, readers, a running sum, and what each reader's sublayer adds to it."""

    sources: list[Tensor]
    directions: Tensor
    partial: Tensor
    outputs: list[Tensor]

    @classmethod
    def random(
        cls, sources: int, readers: int, dtype: torch.dtype, *lead: int, d: int = 20
    ) -> Block:
        draw, wide = (
            random_tensors(10 * sources + readers),
            torch.promote_types(dtype, torch.float32),
        )
        block = cls(
            [(0.3 + j) * draw(*lead, d) for j in range(sources)],
            3 * draw(readers, d) / d**0.5,
            2 * draw(*lead, d),
            [draw(*lead, d) for _ in range(readers)],
        )
        block.sources, block.outputs = (
            [each.to(dtype).requires_grad_() for each in tensors]
            for tensors in (block.sources, block.outputs)
        )
        block.partial = block.partial.to(dtype).requires_grad_()
        block.directions = block.directions.to(wide).requires_grad_()
        return block

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.sources, self.directions, self.partial, *self.outputs]

    def to(self, dtype: torch.dtype) -> Block:
        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).requires_grad_()

        return Block(
            [leaf(each) for each in self.sources],
            leaf(self.directions),
            leaf(self.partial),
            [leaf(each) for each in self.outputs],
        )

    def one_phase(self, library: ModuleType = functional, **options: Any) -> list[Tensor]:
        """What every sublayer reads, and the running sum behind the last."""
        partial, found = self.partial, []
        for direction, output in zip(self.directions, self.outputs, strict=True):
            gain = torch.ones_like(direction)
            sources = [*self.sources, partial]
            found.append(library.read_sources(sources, direction, gain, eps=EPS, **options))
            partial = partial + output
        return [*found, partial]

    def two_phase(
        self, library: ModuleType = kernels, parts: tuple[int, ...] = (), **options: Any
    ) -> list[Tensor]:
        """The same; ``parts`` says how many readers share each pass, all of them without."""
        sources, closed = self.sources, dict(options)
        if library is kernels:
            pairs = [kernels.buffered(source) for source in self.sources]
            sources = [source for source, _ in pairs]
            closed["buffers"] = [buffer for _, buffer in pairs]
        partial, pending, found, first = self.partial, None, [], 0
        for size in parts or (len(self.directions),):
            directions = self.directions[first : first + size]
            for read in library.read_closed(sources, directions, eps=EPS, **closed):
                x, partial = library.merge_running(read, partial, pending, eps=EPS, **options)
                found.append(x)
                pending = self.outputs[len(found) - 1]
            first += size
        return [*found, partial + pending]


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    draw = random_tensors(5)
    cotangents = [draw(*each.shape).to(each.dtype) for each in outputs]
    return list(torch.autograd.grad(outputs, leaves, cotangents))
