# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A transformer layer whose sublayers read from and write to an explicit residual state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import (
    is_prediction_layer,
    is_quantized,
    keep_attention_input,
    keep_mlp_input,
    mixer_arguments,
    mlp_arguments,
)
from megatron_residuals.modules import ResidualState, SublayerResidual
from megatron_residuals.recompute.steps import Step, plain_step

FOREIGN_BLOCK = (
    "a layer with a replaced residual stands in a block that carries no residual state: GPTModel "
    "and HybridModel build their decoders as they must; in a model class of your own call "
    "megatron_residuals.mcore.compose.build_block in place of TransformerBlock"
)
SUBLAYERS = {"self_attention": "_run_attention", "mlp": "_run_mlp", "mixer": "_run_mixer"}
"""By the name of the host's module, which a layer may lack, what runs the bare sublayer."""
BIAS_DROPOUT_ADDS = ("self_attn_bda", "mlp_bda", "mamba_bda")
"""Where the spec of a layer names what adds a sublayer's output to the residual."""


def bias_dropout(
    training: bool, fused: bool
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Drop-in for the host's bias-dropout-add that adds nothing: y = dropout(x + bias).

    As with the host, y has the dtype of the residual: float32 where the host keeps it in that.
    """

    def apply(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, p: float) -> Tensor:
        output, bias = output_and_bias
        output = output.to(residual.dtype)
        if bias is not None:
            output = output + bias
        return torch.nn.functional.dropout(output, p=p, training=training)

    return apply


if TYPE_CHECKING:  # what the mixin stands in front of: this, or another class of LAYERS
    _Host = TransformerLayer
else:
    _Host = object


class ResidualLayerMixin(_Host):
    """Turns a host layer class into one that carries a residual state.

    With the bias-dropout-adds replaced, the host's ``_forward_attention(x)``, ``_forward_mlp(x)``
    and the forward of a Mamba layer return the bare sublayer F(norm(x)); everything around the
    residual (norms fused or not, attention and MLP kinds, recompute inside a sublayer) stays the
    host's. A layer has the sublayers whose modules it has: a GPT layer attention and an MLP, one of
    a hybrid model one of them or a mixer. Their residual modules are given to it by its block,
    which knows where in the model they stand.

    A layer of a multi-token prediction module has no depth of its own: it takes the one hidden
    state behind the decoder. Where the host builds one from our spec it gets its own class.
    """

    host_layer: type[torch.nn.Module]
    parts: tuple[str, ...]
    """Names of the residual modules of the layer's sublayers, in order."""
    runs: tuple[str, ...]
    """The bare sublayers, in the same order."""

    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        """A layer of ours, or for multi-token prediction one of the host's."""
        if is_prediction_layer(*args, **arguments):
            del arguments["residual"]
            return cls.host_layer(*args, **arguments)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        *args: Any,
        residual: ResidualConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if residual is None:  # a DeferredSpec that nobody has worked out
            raise TypeError(FOREIGN_BLOCK)
        submodules = copy.copy(submodules)
        for name in BIAS_DROPOUT_ADDS:
            if hasattr(submodules, name):
                setattr(submodules, name, bias_dropout)
        super().__init__(config, submodules, *args, **kwargs)
        modules = {name: getattr(self, name, None) for name in SUBLAYERS}
        own = [name for name, m in modules.items() if not isinstance(m, IdentityOp | None)]
        self.parts = tuple(f"{name}_residual" for name in own)
        self.runs = tuple(SUBLAYERS[name] for name in own)
        self._discards_norms = False

    def give_residuals(self, modules: Iterable[SublayerResidual[Any, Any]]) -> None:
        """The residual modules of its sublayers, in order, from the block that the layer is in."""
        for name, module in zip(self.parts, modules, strict=True):
            tag_parameters(module, self.config)
            self.add_module(name, module)

    @property
    def residuals(self) -> list[SublayerResidual[Any, Any]]:
        """The residual modules of the layer's sublayers, in order."""
        return [getattr(self, name) for name in self.parts]

    def forward(  # type: ignore[override]  # a state in place of a hidden state
        self,
        state: ResidualState | None = None,
        *,
        step: Step = plain_step,
        parts: Sequence[int] | None = None,
        **arguments: Any,
    ) -> ResidualState:
        """One layer, or one sublayer of it: the state in front -> the state behind.

        ``step`` runs a sublayer on the state; ``parts`` says which sublayers, all by default;
        ``arguments`` are the keyword arguments of the host layer besides ``hidden_states``.

        Raises:
            TypeError: a block of the host's calls the layer with a hidden state.
        """
        if state is None:
            raise TypeError(FOREIGN_BLOCK)
        try:
            for i in range(len(self.parts)) if parts is None else parts:
                run = functools.partial(getattr(self, self.runs[i]), arguments)
                state = step(self.residuals[i], state, run)
            return state
        finally:
            # the host leaves them here, and with them the graph of a step that raises
            vars(self).update(input_layernorm_checkpoint=None, pre_mlp_norm_checkpoint=None)

    def _run_attention(self, arguments: dict[str, Any], x: Tensor) -> Tensor:
        return self._forward_attention(self._input(x), **arguments)[0]

    def _run_mlp(self, arguments: dict[str, Any], x: Tensor) -> Tensor:
        return cast(Tensor, self._forward_mlp(self._input(x), **mlp_arguments(arguments)))

    def _run_mixer(self, arguments: dict[str, Any], x: Tensor) -> Tensor:
        return self.host_layer.forward(self, self._input(x), **mixer_arguments(arguments))

    def _input(self, x: Tensor) -> Tensor:
        """x as the host's checkpoints inside a sublayer need it.

        One whose input has no gradient forgets it, and what trains inside gets none either.
        """
        replays = self._discards_norms or self.config.recompute_granularity == "selective"
        if not replays or x.requires_grad or not torch.is_grad_enabled():
            return x
        return x.detach().requires_grad_()

    def discard_norms(self) -> None:
        """Have the host give up the outputs of its norms and recompute them in backward.

        A norm fused into the linear layer behind it (``IdentityOp`` here) has no output to give up.
        A quantized linear layer keeps a quantized copy of its input, so giving up the input would
        save nothing: it is told to keep the input itself, as the host tells it. The host recomputes
        no norm of a Mamba layer.
        """
        self._discards_norms = isinstance(self, TransformerLayer)
        if not self._discards_norms:
            return
        self.recompute_input_layernorm = not isinstance(self.input_layernorm, IdentityOp)
        self.recompute_pre_mlp_layernorm = not isinstance(self.pre_mlp_layernorm, IdentityOp)
        if not is_quantized(self.config):
            return
        if self.recompute_input_layernorm:
            keep_attention_input(self.self_attention)
        if self.recompute_pre_mlp_layernorm:
            keep_mlp_input(self.mlp)


LAYERS = (TransformerLayer, MambaLayer)
"""The host's layer classes whose sublayers we know."""


@functools.cache
def residual_layer_class(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The residual form of a host layer class, one class for each base."""
    if issubclass(base, ResidualLayerMixin):
        return base
    members = {"__doc__": base.__doc__, "host_layer": base}
    return type(f"Residual{base.__name__}", (ResidualLayerMixin, base), members)


def parameter_device(config: Any) -> torch.device:
    """Where new parameters go: on the host's device, but never away from an ambient meta device.

    There they wait without values, as most of the host's do, until they get memory: what had values
    already would lose them to a ``to_empty`` of the whole model.
    """
    ambient = torch.empty(0).device
    if config.use_cpu_initialization or ambient.type == "meta":
        return ambient
    return torch.device(torch.cuda.current_device())


def tag_parameters(module: torch.nn.Module, config: Any) -> None:
    """Mark parameters that every tensor-parallel rank holds whole.

    With sequence parallelism each rank sees only its tokens, so the host must sum their gradients;
    it does so for parameters that carry ``sequence_parallel``.
    """
    for parameter in module.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel


ResidualTransformerLayer = residual_layer_class(TransformerLayer)
