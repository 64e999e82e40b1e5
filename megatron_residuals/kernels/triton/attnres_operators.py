# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""AttnRes as custom operators with gradients, for ``torch.compile(fullgraph=True)``.

The same launches as `kernels.depth_attention` makes. Gradients of sources come back through
autograd, as a traced graph has no place for the buffers of sources. Shapes: planes [T, d],
directions [S, d], numbers per token in float32. Schemas with lists are written out: torch 2.6 does
not infer them from ``list[Tensor]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.kernels.depth_chunks import MergeForward
from megatron_residuals.kernels.triton import attnres_launches as launches


@torch.library.custom_op(
    "megatron_residuals::attnres_read",
    mutates_args=(),
    schema="(Tensor[] sources, Tensor direction, float eps) -> (Tensor, Tensor, Tensor)",
)
def attnres_read(
    sources: list[Tensor], direction: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, d] of one reader, and what its backward needs: dots and 1 / rms [m, T]."""
    return launches.read_forward(sources, direction, eps)


@attnres_read.register_fake
def _(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(sources), sources[0].shape[0]
    return torch.empty_like(sources[0]), direction.new_empty(shape), direction.new_empty(shape)


@torch.library.custom_op(
    "megatron_residuals::attnres_read_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor[] sources, Tensor direction, Tensor dots, Tensor inverse_rms)"
    " -> Tensor[]",
)
def attnres_read_backward(
    gradient: Tensor, sources: list[Tensor], direction: Tensor, dots: Tensor, inverse_rms: Tensor
) -> list[Tensor]:
    """Gradients of the direction and of every source."""
    m = len(sources)
    numbers = direction, dots, inverse_rms
    found, fresh = launches.read_backward(gradient, sources, *numbers, [None] * m, [True] * m)
    return [found, *[each for each in fresh if each is not None]]


@attnres_read_backward.register_fake
def _(
    gradient: Tensor, sources: list[Tensor], direction: Tensor, dots: Tensor, inverse_rms: Tensor
) -> list[Tensor]:
    return [torch.empty_like(direction), *map(torch.empty_like, sources)]


def _keep_read(ctx: Any, inputs: Any, output: Any) -> None:
    sources, direction, _ = inputs
    ctx.save_for_backward(direction, *output[1:], *sources)


def _read_backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    direction, dots, inverse_rms, *sources = ctx.saved_tensors
    found, *fresh = attnres_read_backward(gradient, sources, direction, dots, inverse_rms)
    return fresh, found, None


attnres_read.register_autograd(_read_backward, setup_context=_keep_read)


@torch.library.custom_op(
    "megatron_residuals::attnres_closed",
    mutates_args=(),
    schema="(Tensor[] sources, Tensor directions, float eps) -> Tensor[]",
)
def attnres_closed(sources: list[Tensor], directions: Tensor, eps: float) -> list[Tensor]:
    """First phase: values [T, d] of S readers, log_sums [S, T]; dots [S, m, T], 1 / rms [m, T]."""
    found = launches.closed_forward(sources, directions, eps)
    return [*found.values, found.log_sums, found.dots, found.inverse_rms]


@attnres_closed.register_fake
def _(sources: list[Tensor], directions: Tensor, eps: float) -> list[Tensor]:
    size, m, tokens = len(directions), len(sources), sources[0].shape[0]
    shapes = (size, tokens), (size, m, tokens), (m, tokens)
    values = [torch.empty_like(sources[0]) for _ in range(size)]
    return [*values, *[directions.new_empty(shape) for shape in shapes]]


@torch.library.custom_op(
    "megatron_residuals::attnres_closed_backward",
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor d_log_sums, Tensor[] sources, Tensor directions, "
    "Tensor dots, Tensor inverse_rms) -> Tensor[]",
)
def attnres_closed_backward(
    gradients: list[Tensor],
    d_log_sums: Tensor,
    sources: list[Tensor],
    directions: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
) -> list[Tensor]:
    """Gradients of the directions and of every source."""
    m = len(sources)
    numbers = directions, dots, inverse_rms
    found, fresh = launches.closed_backward(
        gradients, list(d_log_sums.unbind()), sources, *numbers, [None] * m, [True] * m
    )
    return [found, *[each for each in fresh if each is not None]]


@attnres_closed_backward.register_fake
def _(
    gradients: list[Tensor],
    d_log_sums: Tensor,
    sources: list[Tensor],
    directions: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
) -> list[Tensor]:
    return [torch.empty_like(directions), *map(torch.empty_like, sources)]


def _keep_closed(ctx: Any, inputs: Any, output: Any) -> None:
    sources, directions, _ = inputs
    ctx.save_for_backward(directions, *output[-2:], *sources)


def _closed_backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    directions, dots, inverse_rms, *sources = ctx.saved_tensors
    *values, log_sums = gradients[:-2]
    given = [torch.zeros_like(sources[0]) if each is None else each for each in values]
    d_log_sums = torch.zeros_like(dots[:, 0]) if log_sums is None else log_sums
    found, *fresh = attnres_closed_backward(
        given, d_log_sums, sources, directions, dots, inverse_rms
    )
    return fresh, found, None


attnres_closed.register_autograd(_closed_backward, setup_context=_keep_closed)


@torch.library.custom_op("megatron_residuals::attnres_merge", mutates_args=())
def attnres_merge(
    values: Tensor,
    log_sum: Tensor,
    direction: Tensor,
    partial: Tensor,
    output: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Second phase: x, the sum with an output (empty without one); dot, 1 / rms, share [T]."""
    found = launches.merge_forward(values, log_sum, direction, partial, output, eps)
    total = partial.new_empty(0) if output is None else found.partial
    return found.x, total, found.dots, found.inverse_rms, found.share


@attnres_merge.register_fake
def _(
    values: Tensor,
    log_sum: Tensor,
    direction: Tensor,
    partial: Tensor,
    output: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    total = partial.new_empty(0) if output is None else torch.empty_like(partial)
    dots, inverse_rms, share = (torch.empty_like(log_sum) for _ in range(3))
    return torch.empty_like(partial), total, dots, inverse_rms, share


@torch.library.custom_op("megatron_residuals::attnres_merge_backward", mutates_args=())
def attnres_merge_backward(
    gradient: Tensor,
    d_total: Tensor | None,
    direction: Tensor,
    x: Tensor,
    total: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
    share: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of values, log_sum, direction; of the running sum, which is the output's too."""
    saved = MergeForward(x, total, dots, inverse_rms, share)
    found = launches.merge_backward(gradient, d_total, direction, saved)
    return found.values, found.log_sum, found.direction, found.partial


@attnres_merge_backward.register_fake
def _(
    gradient: Tensor,
    d_total: Tensor | None,
    direction: Tensor,
    x: Tensor,
    total: Tensor,
    dots: Tensor,
    inverse_rms: Tensor,
    share: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    planes = torch.empty_like(x), torch.empty_like(x)
    return planes[0], torch.empty_like(share), torch.empty_like(direction), planes[1]


def _keep_merge(ctx: Any, inputs: Any, output: Any) -> None:
    direction, partial, added = inputs[2:5]
    x, total, *numbers = output
    ctx.adds = added is not None
    ctx.save_for_backward(direction, x, total if ctx.adds else partial, *numbers)


def _merge_backward(ctx: Any, gradient: Tensor, d_total: Tensor, *_: Any) -> tuple[Any, ...]:
    later = d_total if ctx.adds else None
    *found, total = attnres_merge_backward(gradient, later, *ctx.saved_tensors)
    return *found, total, total if ctx.adds else None, None


attnres_merge.register_autograd(_merge_backward, setup_context=_keep_merge)


def read_sources(sources: Sequence[Tensor], direction: Tensor, eps: float) -> Tensor:
    """One reader of sources [..., d]."""
    x: Tensor = attnres_read(_flat(sources), direction, eps)[0]
    return x.view(sources[0].shape)


def read_closed(
    sources: Sequence[Tensor], directions: Tensor, eps: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Values [..., d] and log_sums [...] of all readers."""
    shape = sources[0].shape
    *values, log_sums, _, _ = attnres_closed(_flat(sources), directions, eps)
    found = [each.view(shape[:-1]) for each in log_sums.unbind()]
    return [each.view(shape) for each in values], found


def merge_running(
    values: Tensor,
    log_sum: Tensor,
    direction: Tensor,
    partial: Tensor,
    output: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """x and the running sum [..., d]."""
    flat = _flat([values, partial] if output is None else [values, partial, output])
    added = None if output is None else flat[2]
    x, total, *_ = attnres_merge(flat[0], log_sum.reshape(-1), direction, flat[1], added, eps)
    shape = partial.shape
    return x.view(shape), partial if output is None else total.view(shape)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
