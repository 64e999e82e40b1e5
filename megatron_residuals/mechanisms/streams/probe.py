# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Streams, looked at while they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.diagnostics import statistics
from megatron_residuals.diagnostics.probes import Looked, Probe, View
from megatron_residuals.diagnostics.statistics import composite_gains
from megatron_residuals.diagnostics.tokens import sample_tokens

# Tokens whose H_res are taken home whole, for products over all stages: 2 KiB a sublayer at n = 4.
COMPOSITE_TOKENS = 32


class StreamProbe(Probe):
    """Coefficients, and norms and inner products of the streams.

    Attributes:
        gates: names of the metrics that are parameters of the gates, in their order.
        sigmoids: whether reading and writing are bounded by sigmoids.
        mixes: whether streams are mixed by a matrix.
    """

    gates: tuple[str, ...] = ()
    sigmoids: bool = False
    mixes: bool = True

    def shapes(self, num_sublayers: int) -> dict[str, tuple[int, ...]]:
        """Also the squares of the streams, and whole mixing matrices."""
        n = self.config.streams
        found = {**super().shapes(num_sublayers), "stream_square": (num_sublayers, n)}
        if self.mixes:
            found["matrix_tokens"] = (num_sublayers,)
            found["matrices"] = (num_sublayers, COMPOSITE_TOKENS, n, n)
        return found

    @property
    def _summed(self) -> set[str]:
        return {"stream_square", *(m.name for m in self.metrics if m.per == "token")}

    def columns(self, name: str) -> tuple[int, ...]:
        """One for each stream."""
        return (self.config.streams,) if name in ("read_weights", "write_weights") else ()

    def look(self, module: Any, state: Any, pending: Any) -> Looked:
        """pre, post [S, n], gram [S, n, n] of the streams over their width, and res [S, n, n]."""
        if pending is None:
            return {}
        streams = sample_tokens(pending.streams, 2)
        found = {
            "pre": sample_tokens(pending.h_pre, 1).clone(),
            "post": sample_tokens(pending.h_post, 1).clone(),
            "gram": torch.matmul(streams, streams.mT) / streams.shape[-1],
        }
        if self.mixes:
            found["res"] = sample_tokens(pending.h_res, 2).clone()
        return found

    def sums(self, looked: Looked) -> Looked:
        """Every field of streams but the parameters and the matrices."""
        pre, post, gram = (looked[name] for name in ("pre", "post", "gram"))
        found = {
            "read_weights": pre,
            "write_weights": post,
            "stream_square": gram.diagonal(dim1=-2, dim2=-1),
            "stream_cosine": statistics.mean_cosine(gram),
        }
        if self.mixes:
            res = looked["res"]
            found["gain_forward"] = statistics.row_gain(res)
            found["gain_backward"] = statistics.column_gain(res)
            found["row_error"] = statistics.row_error(res)
            found["column_error"] = statistics.column_error(res)
            found["diagonal"] = statistics.mean_diagonal(res)
        if self.sigmoids:
            found["pre_saturated"] = statistics.saturated_share(pre)
            found["post_saturated"] = statistics.saturated_share(post / 2)
        return {name: found[name].sum(1) for name in found if name in self._summed}

    def parameters(self, module: Any) -> Looked:
        """The gates."""
        values = self.gate_values(module)
        return {} if values is None else dict(zip(self.gates, values.detach(), strict=True))

    def gate_values(self, module: Any) -> Tensor | None:
        """The gates in one tensor; None where there are none."""
        return None

    def whole(self, looked: Looked) -> Looked:
        """Mixing matrices of a few tokens, and how many."""
        if not self.mixes:
            return {}
        res = looked["res"]
        res = res[:, :: -(-res.shape[1] // COMPOSITE_TOKENS)]
        count = res.new_full((len(res),), res.shape[1])
        return {"matrices": res, "matrix_tokens": count}

    def figures(self, total: View, per_token: View) -> Iterator[tuple[str, Tensor]]:
        """Also means of the weights, RMS of the streams, and products of the matrices."""
        yield from super().figures(total, per_token)
        yield "pre_mean", per_token("read_weights").mean(-1)
        yield "post_mean", per_token("write_weights").mean(-1)
        yield "stream_rms", per_token("stream_square").sqrt()
        if not self.mixes:
            return
        matrices = total("matrices")[:, : int(total("matrix_tokens").min().item())]
        yield "mixing", matrices.mean(1).flatten(1)
        yield from zip(
            ("composite_forward", "composite_backward"), composite_gains(matrices), strict=True
        )


class HcProbe(StreamProbe):
    """Gates of the dynamic part; static matrices have none."""

    gates = ("scale_alpha", "scale_beta")

    def gate_values(self, module: Any) -> Tensor | None:
        """s_alpha, s_beta."""
        scale: Tensor | None = getattr(module, "scale", None)
        return scale

    def figures(self, total: View, per_token: View) -> Iterator[tuple[str, Tensor]]:
        """Without gates where there are none."""
        for name, values in super().figures(total, per_token):
            if name not in self.gates or self.config.hc_dynamic:
                yield name, values


class MhcProbe(StreamProbe):
    """Sigmoid gates."""

    gates: tuple[str, ...] = ("alpha_pre", "alpha_post", "alpha_res")
    sigmoids = True

    def gate_values(self, module: Any) -> Tensor | None:
        """The alphas of a sublayer."""
        return torch.cat(module.alphas) if hasattr(module, "alphas") else None


class IdentityProbe(MhcProbe):
    """Without what is of the mixing."""

    gates = ("alpha_pre", "alpha_post")
    mixes = False
