# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every function of ``kernels`` beside its reference, as functions of flat tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_residuals import functional, kernels
from megatron_residuals.functional import (
    MhcOptions,
    MhcWeights,
    StreamCoefficients,
    StreamUpdate,
)
from tests.functional.loops import random_tensors

Flat = Callable[..., tuple[Tensor, ...]]
EPS = 1e-2  # large, so that a misplaced eps shows


@dataclasses.dataclass(frozen=True)
class Case:
    """One function with inputs in float64, unequal in size and asymmetric.

    Attributes:
        activations: names of the inputs that have the dtype of the model; the others are parameters
            or coefficients, float32 or wider.
        kept_per_token: float32 numbers per token that the kernel may keep for backward besides
            references to its inputs.
    """

    name: str
    kernel: Flat
    reference: Flat
    inputs: dict[str, Tensor]
    activations: tuple[str, ...]
    kept_per_token: int

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Detached inputs: activations in a dtype, the rest in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        return [
            value.to(dtype if name in self.activations else wide).clone()
            for name, value in self.inputs.items()
        ]

    def cotangents(self, values: tuple[Tensor, ...]) -> list[Tensor]:
        """Random gradients for every value."""
        draw = random_tensors(77)
        return [draw(*value.shape).to(value.dtype) for value in values]

    def gradients(
        self,
        function: Flat,
        tensors: list[Tensor],
        *,
        trained: tuple[int, ...] | None = None,
        autocast: bool = False,
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """The function's values, and the gradients of its inputs (of some of them: ``trained``).

        ``autocast`` puts the forward into a bfloat16 region, as is usual, and not the backward.
        """
        chosen = range(len(tensors)) if trained is None else trained
        leaves = [t.detach().requires_grad_(i in chosen) for i, t in enumerate(tensors)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values = function(*leaves)
        pairs = zip(values, self.cotangents(values), strict=True)
        if roots := [pair for pair in pairs if pair[0].requires_grad]:
            torch.autograd.backward(*zip(*roots, strict=True))
        return values, [leaf.grad for leaf in leaves]


def _tuple(function: Callable[..., object], **options: object) -> Flat:
    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        value = function(*tensors, **options)
        return (value,) if isinstance(value, Tensor) else tuple(value)  # type: ignore[arg-type]

    return flat


def _write(function: Callable[..., Tensor]) -> Flat:
    return lambda *update: (function(StreamUpdate(*update)),)


def _mhc(function: Callable[..., StreamCoefficients], options: MhcOptions) -> Flat:
    return lambda streams, *weights: tuple(function(streams, MhcWeights(*weights), options))


def _hc(function: Callable[..., StreamCoefficients], norm: str, dynamic: bool) -> Flat:
    def flat(streams: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        mapping, scale = rest[3:] if dynamic else (None, None)
        static = StreamCoefficients(*rest[:3])
        return tuple(function(streams, static, mapping, scale, norm=norm, eps=EPS))

    return flat


def _sources(function: Callable[..., Tensor]) -> Flat:
    def flat(query: Tensor, gain: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        return (function(sources, query, gain, eps=EPS),)

    return flat


def stream_cases(n: int, d: int, *lead: int) -> Iterator[Case]:
    """Reading, writing, and all coefficients of n streams [..., n, d]."""
    draw = random_tensors(100 * n + d)
    streams = draw(*lead, n, d) * torch.arange(1.0, n + 1, dtype=torch.float64).unsqueeze(-1)
    columns = 2 * n + n * n
    read = {"streams": streams, "h_pre": draw(*lead, n)}
    yield Case(
        "read",
        _tuple(kernels.read_streams),
        _tuple(functional.read_streams),
        read,
        ("streams",),
        0,
    )
    h_post, h_res = draw(*lead, n), draw(*lead, n, n)
    write = {"streams": streams, "output": 3 * draw(*lead, d), "h_post": h_post, "h_res": h_res}
    yield Case(
        "write",
        _write(kernels.write_streams),
        _write(functional.write_streams),
        write,
        ("streams", "output"),
        0,
    )
    mhc = {"streams": streams, "mapping": draw(columns, n * d) / d**0.5, "bias": draw(columns)}
    mhc["alpha"] = torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64)
    for convention in ("paper", "dsv4"):
        options = MhcOptions(convention, 7, EPS)
        yield Case(
            f"mhc-{convention}",
            _mhc(kernels.mhc_coefficients, options),
            _mhc(functional.mhc_coefficients, options),
            mhc,
            ("streams",),
            columns,
        )
    head = {"streams": streams, "mapping": draw(n, n * d), "bias": draw(n), "scale": draw(1)}
    yield Case(
        "head",
        _tuple(kernels.mhc_head_weights, eps=EPS),
        _tuple(functional.mhc_head_weights, eps=EPS),
        head,
        ("streams",),
        0,
    )
    static = {"streams": streams, "pre": draw(n), "post": draw(n), "res": draw(n, n)}
    dynamic = {**static, "mapping": draw(n + 2, d), "scale": draw(2)}
    for name, norm, inputs in (
        ("hc-static", "rmsnorm", static),
        ("hc-layernorm", "layernorm", dynamic),
        ("hc-rmsnorm", "rmsnorm", dynamic),
    ):
        yield Case(
            name,
            _hc(kernels.hc_coefficients, norm, inputs is dynamic),
            _hc(functional.hc_coefficients, norm, inputs is dynamic),
            inputs,
            ("streams",),
            0,
        )


def source_case(m: int, d: int, *lead: int) -> Case:
    """Attention over m sources [..., d] of unequal size."""
    draw = random_tensors(100 * m + d)
    names = [f"source{j}" for j in range(m)]
    inputs = {"query": 3 * draw(d) / d**0.5, "gain": 1 + 0.5 * draw(d)}
    inputs.update({name: (0.3 + j) * draw(*lead, d) for j, name in enumerate(names)})
    return Case(
        f"sources-{m}",
        _sources(kernels.read_sources),
        _sources(functional.read_sources),
        inputs,
        tuple(names),
        2 * m,
    )


def heads_case(m: int, d: int, *lead: int) -> Case:
    """Attention by heads over m sources [..., d], added to their sum."""

    def flat(function: Callable[..., Tensor]) -> Flat:
        options = dict(eps=EPS, heads=4, additive=True)
        return lambda query, gain, *sources: (function(sources, query, gain, **options),)

    return dataclasses.replace(
        source_case(m, d, *lead),
        name=f"heads-{m}",
        kernel=flat(kernels.read_by_heads),
        reference=flat(functional.read_by_heads),
        kept_per_token=0,
    )


def cases(d: int, *lead: int, streams: tuple[int, ...] = (1, 2, 3, 4)) -> Iterator[Case]:
    """All functions for some numbers of streams; one, two and nine sources."""
    for n in streams:
        for case in stream_cases(n, d, *lead):
            yield dataclasses.replace(case, name=f"{case.name}-{n}")
    for m in (1, 2, 9):
        yield source_case(m, d, *lead)
    if d % 4 == 0:
        yield heads_case(3, d, *lead)
