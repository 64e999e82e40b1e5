# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of gated streams under the names and in the layout of released models.

DeepSeek-V4 (mHC)
    layers.<l>.hc_attn_fn, hc_ffn_fn         [2n + n^2, n d]   mapping_weight
    layers.<l>.hc_attn_base, hc_ffn_base     [2n + n^2]        bias
    layers.<l>.hc_attn_scale, hc_ffn_scale   [3]               alpha_pre, alpha_post, alpha_res
    hc_head_fn [n, n d], hc_head_base [n], hc_head_scale [1]   head_weight, head_bias, head_scale

Hy4 (iHC)
    model.layers.<l>.hc_attn_layer.hc_pre.hc_fn, hc_mlp_layer…   [2n, n d]   and so on
    model.hc_head.hc_head_fn, …

DeepSeek-V4.1 (Single-Pass mHC): DeepSeek-V4's names without a head, which tells the two apart.

DeepSeek-V4's last n^2 rows are comb[old, new], which is the layout of the ``dsv4`` convention.
``paper`` has H_res[new, old] there: its rows change places on the way out and back, which is exact.
What a model of the other convention computes with them is the same up to eps (the paper's Sinkhorn
steps are DeepSeek's on the transposed logits, without eps).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.interchange.names import head_key, shape_faults, sublayer_key
from megatron_residuals.mechanisms.base import Setting
from megatron_residuals.mechanisms.streams import GatedStreams
from megatron_residuals.pipeline.layout import gpt_place, gpt_sublayers
from megatron_residuals.text import raise_faults

_HEAD = {"fn": "head_weight", "base": "head_bias", "scale": "head_scale"}


@dataclass(frozen=True)
class StreamNames:
    """The public layout of one mechanism of gated streams, as ``mechanisms.base.PublicLayout``.

    Attributes:
        model: what the layout is of, for messages.
        mechanism: whose parameters it has.
        alphas: our names of what a scale holds.
        layer: the public name of a parameter of a layer, with ``layer``, ``part`` and ``name``.
        parts: the public names of the sublayers of a layer.
        head: the public name of a parameter of the head; None where the model has none.
        patterns: forms of names in files, with the groups of ``layer``.
        head_patterns: the same for the head.
        otherwise: what a file is that has a head where the model has none, or the reverse.
    """

    NAME: str
    MODEL_TYPES: tuple[str, ...]
    model: str
    mechanism: str
    alphas: tuple[str, ...]
    layer: str
    parts: tuple[str, str]
    head: str | None
    patterns: tuple[re.Pattern[str], ...]
    head_patterns: tuple[re.Pattern[str], ...]
    SETTINGS: Mapping[str, tuple[str, int | float]] = field(hash=False)
    SAID: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    FIXED: Mapping[str, float] = field(default_factory=dict, hash=False)
    otherwise: str = ""

    def matches(self, name: str) -> bool:
        """Whether a name in a file is one of the parameters here."""
        return any(form.match(name) for form in (*self.patterns, *self.head_patterns))

    def public_config(self, config: ResidualConfig, num_layers: int) -> dict[str, Setting]:
        """The options under the names of the model's configuration."""
        record = config.entry.record(config, None)
        return {word: record[name] for word, (name, _) in self.SETTINGS.items()}

    def export_parameters(
        self, parameters: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
    ) -> dict[str, Tensor]:
        """The parameters of a model under public names, float32.

        A plain mean over the streams becomes the head of equal weights, since the released models
        always have one.

        Raises:
            ValueError: it is another mechanism, or its contraction is no sum with sigmoid weights.
        """
        self._check(config)
        tensors = {}
        for sublayer in gpt_sublayers(num_layers):
            for name, tensor in self._sublayer(parameters, sublayer, config).items():
                tensors[self._key(sublayer, name)] = tensor
        if self.head is not None:
            for name, tensor in _head(parameters, config).items():
                tensors[self.head.format(name=name)] = tensor
        return tensors

    def _check(self, config: ResidualConfig) -> None:
        faults = []
        if config.mechanism != self.mechanism:
            faults.append(
                f"the mechanism is {config.mechanism!r}; {self.NAME} names are for "
                f"{self.mechanism}."
            )
        elif getattr(config, "mhc_mixing", "sinkhorn") != "sinkhorn":
            faults.append(
                f"mixing by {config.mhc_mixing} has no form there; {self.model} has Sinkhorn's."
            )
        elif self.head is None:
            pass
        elif config.resolved_contraction == "sum":
            faults.append(
                f"the contraction is sum, whose weights of one are no values of {self.model}'s "
                "sigmoid head; train with --residual-contraction mean or learned."
            )
        elif config.streams == 1 and config.resolved_contraction == "mean":
            faults.append("one stream with the weight one is no value of a sigmoid head.")
        raise_faults(self.NAME, faults)

    def _key(self, sublayer: int, name: str) -> str:
        layer, position = gpt_place(sublayer)
        return self.layer.format(layer=layer, part=self.parts[position], name=name)

    def _sublayer(
        self, parameters: Mapping[str, Tensor], sublayer: int, config: ResidualConfig
    ) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return parameters[sublayer_key(sublayer, name)].float()

        return {
            "fn": _turned(get("mapping_weight"), config),
            "base": _turned(get("bias"), config),
            "scale": torch.cat([get(name) for name in self.alphas]),
        }

    def import_parameters(
        self,
        tensors: Mapping[str, Tensor],
        config: ResidualConfig,
        num_layers: int,
        hidden_size: int,
    ) -> dict[str, Tensor]:
        """Inverse of ``export_parameters``, for the names of released files and of transformers.

        Tensors with other names are passed over.

        Raises:
            ValueError: parameters are missing or of another shape, or the file has a head that is
                more than the mean, for a model without one; all faults at once.
        """
        self._check_head(tensors)
        found = self._renamed(tensors)
        there = {name: tensor.shape for name, tensor in found.items()}
        raise_faults(self.NAME, shape_faults(there, self._shapes(config, num_layers, hidden_size)))
        parameters = dict(self._imported(found, config, num_layers))
        if self.head is None:
            return parameters
        head = {ours: found[self.head.format(name=name)] for name, ours in _HEAD.items()}
        if config.resolved_contraction == "learned":
            parameters |= {head_key(name): tensor for name, tensor in head.items()}
        elif not _is_mean(head, config):
            raise ValueError(
                f"{self.NAME}: the file has a learned head, and the model contracts by "
                f"{config.resolved_contraction}; give --residual-contraction learned"
            )
        return parameters

    def _check_head(self, names: Iterable[str]) -> None:
        """DeepSeek-V4 and V4.1 have the same names but for the head."""
        has_head = any(form.match(name) for name in names for form in self.head_patterns)
        if self.otherwise and has_head != (self.head is not None):
            raise ValueError(f"{self.NAME}: {self.otherwise}")

    def _shapes(
        self, config: ResidualConfig, num_layers: int, hidden_size: int
    ) -> dict[str, tuple[int, ...]]:
        n, width = config.streams, config.streams * hidden_size
        assert isinstance(config.entry, GatedStreams), "checked by its name"
        columns = config.entry.coefficients(config)
        shapes = {"fn": (columns, width), "base": (columns,), "scale": (len(self.alphas),)}
        wanted = {
            self._key(sublayer, name): shape
            for sublayer in gpt_sublayers(num_layers)
            for name, shape in shapes.items()
        }
        if self.head is None:
            return wanted
        heads = {"fn": (n, width), "base": (n,), "scale": (1,)}
        return wanted | {self.head.format(name=name): shape for name, shape in heads.items()}

    def _renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whatever names a file uses -> those of ``export_parameters``, in float32."""
        found = {}
        for name, tensor in tensors.items():
            for form in self.patterns:
                if (match := form.match(name)) is not None:
                    layer, part, last = match.groups()
                    part = self.parts[0] if part in ("attn", self.parts[0]) else self.parts[1]
                    key = self.layer.format(layer=int(layer), part=part, name=last)
                    found[key] = tensor.float()
            for form in self.head_patterns:
                if self.head is not None and (match := form.match(name)) is not None:
                    found[self.head.format(name=match[1])] = tensor.float()
        return found

    def _imported(
        self, found: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
    ) -> Iterator[tuple[str, Tensor]]:
        for sublayer in gpt_sublayers(num_layers):
            fn, base, scale = (found[self._key(sublayer, n)] for n in ("fn", "base", "scale"))
            yield sublayer_key(sublayer, "mapping_weight"), _turned(fn, config)
            yield sublayer_key(sublayer, "bias"), _turned(base, config)
            for name, alpha in zip(self.alphas, scale.split(1), strict=True):
                yield sublayer_key(sublayer, name), alpha


def _turned(rows: Tensor, config: ResidualConfig) -> Tensor:
    """Rows of the other layout: its own inverse, and nothing to do but for mHC's ``paper``."""
    n = config.streams
    if len(rows) == 2 * n or config.mhc_convention == "dsv4":
        return rows
    res = rows[2 * n :].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
    return torch.cat([rows[: 2 * n], res])


def _added(config: ResidualConfig) -> float:
    """The eps that is added to the weights of a head."""
    added: float | None = config.resolved_gate_eps
    return float(config.resolved_mhc_eps) if added is None else added


def _head(parameters: Mapping[str, Tensor], config: ResidualConfig) -> dict[str, Tensor]:
    if config.resolved_contraction == "learned":
        return {name: parameters[head_key(ours)].float() for name, ours in _HEAD.items()}
    n = config.streams
    some = parameters[sublayer_key(0, "mapping_weight")]
    weight = 1 / n - _added(config)
    return {
        "fn": torch.zeros(n, some.shape[1], device=some.device),
        "base": torch.full((n,), math.log(weight / (1 - weight)), device=some.device),
        "scale": torch.ones(1, device=some.device),
    }


def _is_mean(head: Mapping[str, Tensor], config: ResidualConfig) -> bool:
    """Whether the head of a file says no more than the mean."""
    weights = torch.sigmoid(head["head_bias"].double()) + _added(config)
    even = torch.full_like(weights, 1 / config.streams)
    return not head["head_weight"].any() and torch.allclose(weights, even, rtol=0, atol=1e-6)


# Released files, with or without a prefix, and the same under the names of transformers' modules.
_MODULE = re.compile(r"^(?:model\.)?layers\.(\d+)\.(attn|ffn)_hc\.(fn|base|scale)$")

DEEPSEEK_V4 = StreamNames(
    NAME="deepseek-v4",
    # V4.1 has other layers under the same names: it reads with the weights of the sublayer before.
    MODEL_TYPES=("deepseek_v4",),
    model="DeepSeek-V4",
    mechanism="mhc",
    alphas=("alpha_pre", "alpha_post", "alpha_res"),
    layer="layers.{layer}.hc_{part}_{name}",
    parts=("attn", "ffn"),
    head="hc_head_{name}",
    patterns=(
        re.compile(r"^(?:model\.)?layers\.(\d+)\.hc_(attn|ffn)_(fn|base|scale)$"),
        _MODULE,
    ),
    head_patterns=(re.compile(r"^(?:model\.)?(?:hc_head\.hc_|hc_head_)(fn|base|scale)$"),),
    SETTINGS={
        "hc_mult": ("streams", 1),
        "hc_sinkhorn_iters": ("mhc_sinkhorn_iterations", 1),
        "hc_eps": ("mhc_eps", 1.0),
        "rms_norm_eps": ("mhc_eps", 1.0),  # of the norm in front of the coefficients
    },
    SAID={"mhc_convention": "dsv4", "mhc_mixing": "sinkhorn"},
    otherwise="the file has no hc_head, so it is DeepSeek-V4.1's (--residual single_pass_mhc)",
)
DEEPSEEK_V41 = replace(
    DEEPSEEK_V4,
    NAME="deepseek-v4.1",
    MODEL_TYPES=("deepseek_v41", "deepseek_v41_text"),  # the whole model, and its language model
    model="DeepSeek-V4.1",
    mechanism="single_pass_mhc",
    head=None,
    otherwise="the file has an hc_head, so it is DeepSeek-V4's (--residual mhc)",
)
HY4 = StreamNames(
    NAME="hy4",
    MODEL_TYPES=("hy_v4",),
    model="Hy4",
    mechanism="ihc",
    alphas=("alpha_pre", "alpha_post"),
    layer="model.layers.{layer}.hc_{part}_layer.hc_pre.hc_{name}",
    parts=("attn", "mlp"),
    head="model.hc_head.hc_head_{name}",
    patterns=(
        re.compile(r"^(?:model\.)?layers\.(\d+)\.hc_(attn|mlp)_layer\.hc_pre\.hc_(fn|base|scale)$"),
        _MODULE,
    ),
    head_patterns=(re.compile(r"^(?:model\.)?hc_head\.hc_(?:head_)?(fn|base|scale)$"),),
    SETTINGS={
        "hc_mult": ("streams", 1),
        "hc_eps": ("ihc_gate_eps", 1.0),
        "rms_norm_eps": ("mhc_eps", 1.0),
    },
    FIXED={"hc_magnitude": 2.0},  # of the sigmoid that writes
)
