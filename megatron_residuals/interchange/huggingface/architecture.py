# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments a Megatron run recorded, as the configuration of the exported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from megatron_residuals.text import raise_faults

Arguments: TypeAlias = Mapping[str, Any]

# What the exported model does not compute, with the values that ask for nothing of it.
OFF: dict[str, tuple[object, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "layernorm_zero_centered_gamma": (False,),
    "linear_attention_freq": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "num_experts": (None,),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "use_mup": (False,),
    "window_size": (None,),
}
CHOICES: dict[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding_type": ("rope", "learned_absolute"),
}
NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
NORM_EPS = ("layernorm_epsilon", "norm_epsilon")  # of releases from 0.19 on, and of earlier ones


def model_config(args: Arguments, vocab_size: int, source: object) -> dict[str, Any]:
    """Sizes and options under the names of ``ResidualGPTConfig``.

    Args:
        args: the recorded arguments by name.
        vocab_size: rows of the embedding, padding included: they are in the softmax of training.

    Raises:
        ValueError: arguments are missing, or ask for what the exported model does not compute.
    """
    raise_faults(f"{source} cannot be exported", _faults(args))
    heads = args["num_attention_heads"]
    grouped = args.get("group_query_attention", args.get("num_query_groups") is not None)
    bias = bool(args.get("add_bias_linear", True))
    return {
        "vocab_size": vocab_size,
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if grouped else heads,
        "head_dim": args.get("kv_channels") or args["hidden_size"] // heads,
        "hidden_act": _activation(args),
        "gated": bool(args.get("swiglu")),
        "norm": args.get("normalization", "LayerNorm"),
        "norm_eps": _norm_eps(args),
        "qk_norm": bool(args.get("qk_layernorm")),
        "attention_bias": bias or bool(args.get("add_qkv_bias")),
        "bias": bias,
        "rotary": _rotary(args),
        "max_position_embeddings": args.get("max_position_embeddings") or 2048,
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights"),
    }


def _faults(args: Arguments) -> list[str]:
    faults = [f"its arguments have no {name}." for name in NEEDED if args.get(name) is None]
    if _norm_eps(args) is None:
        faults.append(f"its arguments have no {' or '.join(NORM_EPS)}.")
    for table, word in ((OFF, "the exported model has none but"), (CHOICES, "allowed:")):
        for name, allowed in table.items():
            if name in args and args[name] is not None and args[name] not in allowed:
                known = ", ".join(str(value) for value in allowed if value is not None) or "none"
                faults.append(f"{name} is {args[name]!r}; {word} {known}.")
    return faults


def _norm_eps(args: Arguments) -> float | None:
    return next((args[name] for name in NORM_EPS if args.get(name) is not None), None)


def _activation(args: Arguments) -> str:
    """As the host chooses it: its fused GELU with a bias is the tanh form."""
    if args.get("swiglu"):
        return "silu"
    if args.get("squared_relu"):
        return "relu2"
    fused = args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu") else "gelu"


def _rotary(args: Arguments) -> dict[str, Any] | None:
    if args.get("position_embedding_type", "learned_absolute") != "rope":
        return None
    scaled = args.get("use_rope_scaling")
    return {
        "base": args.get("rotary_base", 10000),
        "percent": args.get("rotary_percent", 1.0),
        "interpolation": args.get("rotary_seq_len_interpolation_factor"),
        "scaling_factor": args.get("rope_scaling_factor", 8.0) if scaled else None,
    }
