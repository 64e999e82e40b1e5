# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a hybrid model with stock Megatron-Core (0.17, 0.18, 0.19), straight from the wheel.

Layers of any kind in the order of ``--hybrid-layer-pattern``; data, batches and the loss are those
of ``pretrain_gpt.py`` beside it. It knows nothing of residual connections: run it by itself, or
unchanged through ``python -m megatron_residuals.run``.
"""

from __future__ import annotations

import importlib
import importlib.util

import pretrain_gpt
import torch
from megatron.core.models.mamba import mamba_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

# 0.17 calls hybrid models after Mamba; from 0.18 on that is another name for them.
HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None
MODEL = "hybrid.hybrid_model.HybridModel" if HAS_HYBRID else "mamba.mamba_model.MambaModel"


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> torch.nn.Module:
    """Build one pipeline stage (0.17 and 0.18; from 0.19 on the host's own builder does it)."""
    args = get_args()
    pretrain_gpt.refuse_unsupported(args, pretrain_gpt.REFUSED_ARGS_WITH_PROVIDER)
    module, _, name = f"megatron.core.models.{MODEL}".rpartition(".")
    model_class = getattr(importlib.import_module(module), name)
    model: torch.nn.Module = model_class(
        config or core_transformer_config_from_args(args),
        import_module(args.spec) if args.spec else mamba_layer_specs.mamba_stack_spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    return model


if __name__ == "__main__":
    pretrain_gpt.main(model_provider, "hybrid_config_from_args")
