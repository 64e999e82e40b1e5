# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a record must say, worked out from everything that passed in a step of one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.modules.base import SublayerResidual


class Everything:
    """All that passes the residual modules of one process, and gradients of outputs."""

    def __init__(self, chunk: Any) -> None:
        layers = chunk.decoder.layers
        parts = [[layer.self_attention_residual, layer.mlp_residual] for layer in layers]
        self.modules = [*sum(parts, []), chunk.decoder.residual_head]
        self.reads: dict[int, list[Tensor]] = {}
        self.pending: dict[int, list[Any]] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        for index, module in enumerate(self.modules):
            if not isinstance(module, SublayerResidual):
                module.register_forward_hook(functools.partial(self._after_close, index))
                continue
            module.read = functools.partial(self._read, index, module.read)
            module.write = functools.partial(self._write, index, module.write)

    def _after_close(self, index: int, module: Any, inputs: Any, hidden: Tensor) -> None:
        self._note(index, hidden, inputs[0])

    def _read(self, index: int, read: Any, state: Any) -> Any:
        x, pending = read(state)
        self._note(index, x, pending)
        return x, pending

    def _note(self, index: int, x: Tensor, pending: Any) -> None:
        self.reads.setdefault(index, []).append(x.detach())
        self.pending.setdefault(index, []).append(pending)

    def _write(self, index: int, write: Any, pending: Any, output: Tensor) -> Any:
        output.retain_grad()
        self.outputs.setdefault(index, []).append(output)
        return write(pending, output)

    def tokens(self, index: int, name: str, features: int) -> Tensor:
        """A part of what reads left, over all tokens of all micro-batches."""
        parts = [getattr(pending, name).detach() for pending in self.pending[index]]
        return torch.cat([part.flatten(0, -1 - features) for part in parts])


def rms(tensors: list[Tensor]) -> float:
    values = torch.cat([tensor.flatten() for tensor in tensors]).double()
    return math.sqrt(values.square().mean().item())


def stream_figures(all_: Everything, index: int, *, mhc: bool) -> dict[str, Any]:
    h_res, streams = all_.tokens(index, "h_res", 2), all_.tokens(index, "streams", 2)
    pre, post = all_.tokens(index, "h_pre", 1), all_.tokens(index, "h_post", 1)
    rows, columns, n = h_res.sum(2), h_res.sum(1), h_res.shape[-1]
    normed = streams / streams.norm(dim=-1, keepdim=True)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    cosines = [(normed[:, i] * normed[:, j]).sum(-1).mean().item() for i, j in pairs]
    module = all_.modules[index]
    figures: dict[str, Any] = {
        "gain_forward": rows.abs().max(1).values.mean().item(),
        "gain_backward": columns.abs().max(1).values.mean().item(),
        "diagonal": sum(h_res[:, i, i].mean().item() for i in range(n)) / n,
        "pre_mean": pre.mean().item(),
        "post_mean": post.mean().item(),
        "stream_cosine": sum(cosines) / len(cosines),
        "read_weights": pre.mean(0).tolist(),
        "write_weights": post.mean(0).tolist(),
        "stream_rms": [rms([streams[:, i]]) for i in range(n)],
    }
    if not mhc:
        return figures | {
            "scale_alpha": module.scale[0].item(),
            "scale_beta": module.scale[1].item(),
        }
    ends = ((pre < 0.01) | (pre > 0.99)).double().mean().item()
    post_ends = ((post < 0.02) | (post > 1.98)).double().mean().item()
    return figures | {
        "row_error": (rows - 1).abs().max(1).values.mean().item(),
        "column_error": (columns - 1).abs().max(1).values.mean().item(),
        "pre_saturated": ends,
        "post_saturated": post_ends,
        **{f"alpha_{x}": getattr(module, f"alpha_{x}").item() for x in ("pre", "post", "res")},
    }


def source_figures(all_: Everything, index: int, max_sources: int) -> dict[str, Any]:
    module = all_.modules[index]
    query, gain = module.query.detach(), module.key_gain.detach()
    weights = []
    for state in all_.pending[index]:
        logits = []
        for source in state.readable:
            key = gain * source.detach() / (source.detach().square().mean(-1, True) + 1e-6).sqrt()
            logits.append((key * query).sum(-1).flatten())
        exp = torch.stack(logits, -1).exp()
        weights.append(exp / exp.sum(-1, keepdim=True))
    alpha = torch.cat(weights)
    mean = alpha.mean(0).tolist()
    entropy = -(alpha * alpha.log()).sum(-1).mean().item()
    return {
        "weights": mean + [math.nan] * (max_sources - len(mean)),
        "entropy": entropy / math.log(len(mean)) if len(mean) > 1 else 1.0,
        "peak": alpha.max(-1).values.mean().item(),
        "embedding_mass": mean[0],
        "open_mass": mean[-1],
        "query_norm": query.square().sum().sqrt().item(),
        "key_gain_rms": gain.square().mean().sqrt().item(),
    }


def composites(all_: Everything, num_tokens: int) -> dict[str, Any]:
    """Products through and from every sublayer, of the first micro-batch's tokens, by loops; and
    what is multiplied."""
    per_layer = [
        all_.pending[i][0].h_res.detach().flatten(0, 1)[:num_tokens]
        for i in range(len(all_.modules) - 1)
    ]
    forward, backward = [], []
    for i in range(len(per_layer)):
        up = functools.reduce(lambda product, h: h @ product, per_layer[: i + 1])
        down = functools.reduce(lambda product, h: h @ product, per_layer[i:])
        forward.append(up.sum(2).abs().max(1).values.mean().item())
        backward.append(down.sum(1).abs().max(1).values.mean().item())
    mixing = [h.mean(0).flatten().tolist() for h in per_layer]
    return {"composite_forward": forward, "composite_backward": backward, "mixing": mixing}
