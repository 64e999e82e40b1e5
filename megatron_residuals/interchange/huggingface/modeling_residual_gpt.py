# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A GPT whose residual connection is a mechanism of megatron_residuals, for transformers.

The equations of the mechanism are in residual.py beside this file. Norms, attention and MLP
compute what Megatron-Core's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from megatron_residuals.mechanisms.plain.exported import Head, Sublayer, open_state

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}


class ResidualGPTConfig(PretrainedConfig):
    """Sizes of the model; ``residual`` are the settings of the mechanism, as they were recorded."""

    model_type = "residual_gpt"

    def __init__(
        self,
        vocab_size: int = 128,
        hidden_size: int = 64,
        intermediate_size: int = 256,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 16,
        hidden_act: str = "silu",
        gated: bool = True,
        norm: str = "RMSNorm",
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        attention_bias: bool = False,
        bias: bool = False,
        rotary: dict[str, Any] | None = None,
        max_position_embeddings: int = 1024,
        residual: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.intermediate_size, self.num_hidden_layers = intermediate_size, num_hidden_layers
        self.num_attention_heads, self.head_dim = num_attention_heads, head_dim
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act, self.gated = hidden_act, gated
        self.norm, self.norm_eps, self.qk_norm = norm, norm_eps, qk_norm
        self.attention_bias, self.bias = attention_bias, bias
        self.rotary, self.max_position_embeddings = rotary, max_position_embeddings
        self.residual = residual or {"mechanism": "residual"}
        super().__init__(**kwargs)


class Float32Module(nn.Module):
    """Parameters that stay float32 in whatever dtype an engine makes them anew."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's, in float32."""
        if param is not None and param.dtype != torch.float32:
            param = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)


class ResidualSublayer(Float32Module, Sublayer):
    """The mechanism at one sublayer."""


class ResidualHead(Float32Module, Head):
    """The mechanism in front of the final norm."""


def rotary_angles(rotary: dict[str, Any], head_dim: int, positions: Tensor) -> Tensor:
    """Angles [b, s, rotary dim] of positions [b, s], float32."""
    dim = int(head_dim * rotary["percent"])
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    inverse = 1.0 / rotary["base"] ** exponents
    if rotary["scaling_factor"] is not None:
        inverse = _llama3_scaling(inverse, rotary["scaling_factor"])
    scaled = positions.float()
    if rotary["interpolation"] is not None:
        scaled = scaled * (1 / rotary["interpolation"])
    angles = scaled[..., None] * inverse
    return torch.cat((angles, angles), dim=-1)


def _llama3_scaling(inverse: Tensor, factor: float, length: int = 8192) -> Tensor:
    """Long waves slower by the factor, short ones as they are, between 1 and 4 of a mix of both."""
    wavelength = 2 * math.pi / inverse
    slow = torch.where(wavelength > length, inverse / factor, inverse)
    smooth = (length / wavelength - 1) / 3
    mixed = (1 - smooth) * slow / factor + smooth * slow
    medium = ~(wavelength < length / 4) & ~(wavelength > length)
    return torch.where(medium, mixed, slow)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of heads [b, heads, s, d]."""
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


class Attention(nn.Module):
    """Attention of many heads, with fewer heads of keys and values where there are groups."""

    is_causal = True

    def __init__(self, config: ResidualGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups, self.scaling = heads // groups, config.head_dim**-0.5
        size, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, groups * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=config.bias)
        if config.qk_norm:
            self.q_norm = _norm(config, self.head_dim)
            self.k_norm = _norm(config, self.head_dim)

    def forward(
        self,
        x: Tensor,
        positions: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cache: Any,
        **kwargs: Any,
    ) -> Tensor:
        """x [b, s, d] -> [b, s, d]; positions are the cosine and the sine of rotary angles."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if positions is not None:
            query, key = rotate(query, *positions), rotate(key, *positions)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs
        )
        return self.o_proj(output.reshape(*x.shape[:-1], -1))


class MLP(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x)."""

    def __init__(self, config: ResidualGPTConfig, inner: int) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.bias
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(size, inner, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        up = self.up_proj(x)
        return self.down_proj(
            self.act(up) if self.gate_proj is None else self.act(self.gate_proj(x)) * up
        )


def _norm(config: ResidualGPTConfig, size: int) -> nn.Module:
    return (nn.RMSNorm if config.norm == "RMSNorm" else nn.LayerNorm)(size, eps=config.norm_eps)


class Layer(nn.Module):
    """Attention and MLP, each read from and written to the state of the residual."""

    def __init__(self, config: ResidualGPTConfig, layer_idx: int) -> None:
        super().__init__()
        size, settings = config.hidden_size, config.residual
        self.input_layernorm, self.self_attn = _norm(config, size), Attention(config, layer_idx)
        self.post_attention_layernorm = _norm(config, size)
        self.mlp = MLP(config, config.intermediate_size)
        self.attn_residual = ResidualSublayer(settings, size, 2 * layer_idx)
        self.mlp_residual = ResidualSublayer(settings, size, 2 * layer_idx + 1)

    def forward(self, state: Any, **arguments: Any) -> Any:
        """The state of the residual behind the layer."""
        state = self.attn_residual(
            state, lambda x: self.self_attn(self.input_layernorm(x), **arguments)
        )
        return self.mlp_residual(state, lambda x: self.mlp(self.post_attention_layernorm(x)))


class ResidualGPTPreTrainedModel(PreTrainedModel):
    """What transformers and serving engines ask of the class."""

    config: ResidualGPTConfig
    config_class = ResidualGPTConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["attn_residual", "mlp_residual", "residual_head"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class ResidualGPTModel(ResidualGPTPreTrainedModel):
    """Embedding, layers, and the final norm behind the residual's head."""

    def __init__(self, config: ResidualGPTConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, size)
        has_table = config.rotary is None
        table = nn.Embedding(config.max_position_embeddings, size) if has_table else None
        self.embed_positions = table
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.residual_head = ResidualHead(config.residual, size)
        self.norm = _norm(config, size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Another embedding of tokens."""
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [b, s, d] behind the final norm."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = start + torch.arange(hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        positions, rotary = None, self.config.rotary
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(position_ids)
        elif rotary is not None:
            angles = rotary_angles(rotary, self.config.head_dim, position_ids)[:, None]
            positions = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        state = open_state(hidden, self.config.residual)
        for layer in self.layers:
            state = layer(state, positions=positions, attention_mask=mask, cache=cache, **kwargs)
        hidden = self.norm(self.residual_head(state))
        return BaseModelOutputWithPast(last_hidden_state=hidden, cache=cache)


class ResidualGPTForCausalLM(ResidualGPTPreTrainedModel, GenerationMixin):
    """The model with its output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: ResidualGPTConfig) -> None:
        super().__init__(config)
        self.model = ResidualGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [b, s, vocabulary], and the loss where there are labels."""
        kwargs.pop("return_dict", None)
        outputs = self.model(input_ids, **kwargs)
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep if logits_to_keep else None :]
        else:
            hidden = hidden[:, logits_to_keep]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=outputs.cache)
