# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Custom operators around the launches.

Shapes are those of the contract; a list holds the values of a record, less the h_res that is None.
An operator's results are never views of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_residuals.functional.streams import MhcOptions, MhcWeights, StreamRead, StreamUpdate
from megatron_residuals.kernels.common.triton import custom_operator
from megatron_residuals.kernels.streams.contract import Kept
from megatron_residuals.kernels.streams.triton import boundary, launches


def present(record: Iterable[Tensor | None]) -> list[Tensor]:
    """The tensors of a record."""
    return [each for each in record if each is not None]


@custom_operator("read_streams(Tensor streams, Tensor h_pre) -> Tensor")
def read_streams(streams: Tensor, h_pre: Tensor) -> Tensor:
    """[T, n, d], [T, n] -> [T, d]"""
    return launches.read(streams, h_pre)


@read_streams.register_fake
def _(streams: Tensor, h_pre: Tensor) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


@custom_operator(
    "read_streams_backward(Tensor gradient, Tensor streams, Tensor h_pre) -> (Tensor, Tensor)"
)
def read_streams_backward(
    gradient: Tensor, streams: Tensor, h_pre: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of streams and h_pre."""
    d_pre = launches.products(gradient, streams, h_pre.dtype)
    read = launches.ReadGradient(gradient, h_pre)
    return launches.streams_backward(None, read, None, streams)[0].streams, d_pre


@read_streams_backward.register_fake
def _(gradient: Tensor, streams: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(streams), torch.empty_like(h_pre)


@custom_operator("write_streams(Tensor[] update) -> Tensor")
def write_streams(update: list[Tensor]) -> Tensor:
    """The streams behind a write."""
    return launches.write(StreamUpdate(*update))


@write_streams.register_fake
def _(update: list[Tensor]) -> Tensor:
    return torch.empty_like(update[0])


@custom_operator("write_streams_backward(Tensor gradient, Tensor[] update) -> Tensor[]")
def write_streams_backward(gradient: Tensor, update: list[Tensor]) -> list[Tensor]:
    """Gradients of the update."""
    given = StreamUpdate(*update)
    return present(launches.streams_backward(gradient, None, given, given.streams)[0])


@write_streams_backward.register_fake
def _(gradient: Tensor, update: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(each) for each in update]


@custom_operator(
    "update_and_read(Tensor[] before, Tensor[] weights, Tensor? reads, "
    "str convention, int iterations, float eps, float? gate_eps) -> Tensor[]"
)
def update_and_read(
    before: list[Tensor],
    weights: list[Tensor],
    reads: Tensor | None,
    convention: str,
    iterations: int,
    eps: float,
    gate_eps: float | None,
) -> list[Tensor]:
    """``StreamRead``, then the mixes; without the streams where ``before`` is streams alone."""
    updates = len(before) > 1
    found, mixes = boundary.update_and_read(
        StreamUpdate(*before) if updates else before[0],
        MhcWeights(*weights),
        MhcOptions(convention, iterations, eps, gate_eps),
        reads,
    )
    return [*present(found if updates else found[1:]), mixes]


@update_and_read.register_fake
def _(
    before: list[Tensor],
    weights: list[Tensor],
    reads: Tensor | None,
    convention: str,
    iterations: int,
    eps: float,
    gate_eps: float | None,
) -> list[Tensor]:
    streams, mapping = before[0], weights[0]
    tokens, n, d = streams.shape
    written = [torch.empty_like(streams)] if len(before) > 1 else []
    options = MhcOptions(convention, iterations, eps, gate_eps)
    shapes = [(tokens, n), (tokens, n), *[(tokens, n, n)] * options.mixes]
    shapes.append(boundary.mixes_shape(tokens, n, mapping.shape[0], options))
    return [*written, streams.new_empty(tokens, d), *map(mapping.new_empty, shapes)]


@custom_operator(
    "update_and_read_backward(Tensor[] gradients, Tensor[] kept, Tensor[] update, "
    "Tensor[] weights, bool reads, str convention, int iterations, float eps, float? gate_eps) "
    "-> Tensor[]"
)
def update_and_read_backward(
    gradients: list[Tensor],
    kept: list[Tensor],
    update: list[Tensor],
    weights: list[Tensor],
    reads: bool,
    convention: str,
    iterations: int,
    eps: float,
    gate_eps: float | None,
) -> list[Tensor]:
    """Gradients of the update (of streams alone where there is none), the weights and the read."""
    before, found, d_read = boundary.update_and_read_backward(
        StreamRead(*gradients),
        Kept(*kept),
        StreamUpdate(*update) if update else None,
        MhcWeights(*weights),
        MhcOptions(convention, iterations, eps, gate_eps),
        reads=reads,
    )
    return [*present(before if update else before[:1]), *found, d_read]


@update_and_read_backward.register_fake
def _(
    gradients: list[Tensor],
    kept: list[Tensor],
    update: list[Tensor],
    weights: list[Tensor],
    reads: bool,
    convention: str,
    iterations: int,
    eps: float,
    gate_eps: float | None,
) -> list[Tensor]:
    return [torch.empty_like(each) for each in (*(update or kept[:1]), *weights, kept[1])]
