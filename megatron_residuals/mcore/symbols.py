# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every symbol of the host that we subclass, replace or call, and what we expect of it.

The host gives no promise about most of them. A release that lacks one, or gave it other parameters,
is found by looking here instead of in the middle of a run.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from megatron_residuals.mcore.compat import HYBRID_MODEL

_CORE, _TRAINING = "megatron.core", "megatron.training"
_TE = f"{_CORE}.extensions.transformer_engine"


@dataclass(frozen=True)
class HostSymbol:
    """A name of the host.

    path is dotted, members after their class; parameters are those that we pass or override; use
    says what we do with it. Where optional, only what use says needs it.
    """

    path: str
    parameters: tuple[str, ...] = ()
    use: str = ""
    optional: bool = False

    def fault(self) -> str | None:
        """What is wrong with it in the installed host; None if nothing is."""
        try:
            found = _resolve(self.path)
        except (ImportError, AttributeError) as error:
            return f"does not exist ({error})"
        if not self.parameters:
            return None
        names = inspect.signature(found).parameters
        lacking = [name for name in self.parameters if name not in names]
        if not lacking:
            return None
        return f"takes no {', '.join(lacking)} (but {', '.join(names) or 'nothing'})"


def _symbol(path: str, parameters: str, use: str, *, optional: bool = False) -> HostSymbol:
    return HostSymbol(f"{_CORE}.{path}", tuple(parameters.split()), use, optional)


_LAYER = "transformer.transformer_layer.TransformerLayer"
_BLOCK = "transformer.transformer_block.TransformerBlock"
LAUNCHES = "reads a launch ahead of the run, which needs megatron.training"
REHEARSES = "--rehearse: watched, or done without what a rehearsal has not"
_SCHEDULES = "pipeline_parallel.schedules"
_STEP = "model num_microbatches forward_only"
_P2P = "pipeline_parallel.p2p_communication.P2PCommunicator"
_HALF = "optimizer.optimizer.Float16OptimizerWithFloat16Params"
_MESSAGES = "tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs"
_WRAPPER = (
    "inference.model_inference_wrappers.abstract_model_inference_wrapper"
    ".AbstractModelInferenceWrapper"
)
_SHARDED = "prefix sharded_offsets metadata"

SYMBOLS = (
    _symbol(_BLOCK, "config spec pre_process post_process vp_stage pg_collection", "subclassed"),
    _symbol(f"{_BLOCK}.forward", "hidden_states attention_mask", "overridden"),
    _symbol(f"{_BLOCK}.set_input_tensor", "input_tensor", "overridden"),
    _symbol(f"{_BLOCK}.sharded_state_dict", _SHARDED, "saves and loads the parameters"),
    _symbol(_LAYER, "config submodules layer_number", "mixed into"),
    _symbol(f"{_LAYER}.forward", "", "overridden"),
    _symbol(f"{_LAYER}._forward_attention", "hidden_states attention_mask", "runs attention"),
    _symbol(f"{_LAYER}._forward_mlp", "hidden_states", "runs the MLP"),
    _symbol(
        "transformer.transformer_layer.get_transformer_layer_offset", "config", "numbers layers"
    ),
    _symbol("ssm.mamba_layer.MambaLayer", "config submodules layer_number", "mixed into"),
    _symbol("ssm.mamba_block.MambaStack", "config submodules", "subclassed for hybrid models"),
    HostSymbol(f"{HYBRID_MODEL}.__init__", (), "replaced: gives its stack a residual"),
    _symbol("models.mamba.mamba_layer_specs.mamba_stack_spec", "", "hybrid layers without --spec"),
    _symbol("models.mamba.mamba_layer_specs.mamba_inference_stack_spec", "", "likewise"),
    _symbol(_P2P, "pp_group config", "subclassed"),
    _symbol(f"{_P2P}._communicate", _MESSAGES, "overridden: every message passes here"),
    _symbol("models.gpt.gpt_model.TransformerBlock", "", "replaced"),
    _symbol(f"{_SCHEDULES}.P2PCommunicator", "", "replaced"),
    _symbol(f"{_SCHEDULES}.forward_backward_pipelining_without_interleaving", _STEP, "replaced"),
    _symbol(f"{_SCHEDULES}.forward_backward_pipelining_with_interleaving", _STEP, "replaced"),
    _symbol(
        f"{_SCHEDULES}.get_schedule_table",
        "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage",
        "tells the order of messages",
    ),
    _symbol("utils.get_model_config", "model", "finds the route of a model"),
    _symbol("parallel_state.create_group", "ranks", "makes the groups of messages"),
    _symbol("utils.WrappedTensor.unwrap", "", "generates"),
    _symbol("inference.contexts.StaticInferenceContext", "", "generates"),
    _symbol(f"{_WRAPPER}.__init__", "model", "replaced"),
    _symbol(f"{_WRAPPER}._allocate_recv_buffer", "batch_size seq_len", "replaced"),
    _symbol("dist_checkpointing.load", "sharded_state_dict checkpoint_dir strict", "replaced"),
    _symbol("dist_checkpointing.mapping.ShardedTensor", "key data", "read in requests"),
    _symbol(
        "dist_checkpointing.mapping.ShardedObject",
        "key data replica_id",
        "holds the settings, read in requests",
    ),
    _symbol("dist_checkpointing.mapping.ShardedBase", "", "read in requests"),
    _symbol("dist_checkpointing.mapping.ShardedTensorFactory.build", "", "read in requests"),
    _symbol("dist_checkpointing.mapping.LocalNonpersistentObject", "obj", "keeps initial values"),
    _symbol("dist_checkpointing.dict_utils.nested_values", "x", "reads requests"),
    _symbol("dist_checkpointing.dict_utils.dict_list_map_outplace", "f x", "changes requests"),
    _symbol("transformer.module.MegatronModule", "config", "subclassed"),
    _symbol("transformer.module.MegatronModule.sharded_state_dict", _SHARDED, "overridden"),
    _symbol("transformer.spec_utils.ModuleSpec", "module params submodules", "subclassed"),
    _symbol(
        "transformer.transformer_block.TransformerBlockSubmodules",
        "layer_specs layer_norm",
        "subclassed",
    ),
    _symbol(
        "transformer.transformer_block._get_block_submodules",
        "config spec vp_stage pp_rank",
        "builds the layers of a stage",
    ),
    _symbol(
        "transformer.transformer_block.get_num_layers_to_build",
        "config vp_stage pp_rank",
        "splits the layers over stages",
    ),
    _symbol(
        "models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
        "config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank",
        "builds the layers without --spec",
    ),
    _symbol("transformer.enums.LayerType.decoder", "", "splits the layers over stages"),
    _symbol("transformer.identity_op.IdentityOp", "", "tells fused norms"),
    _symbol("tensor_parallel.checkpoint", "function distribute_saved_activations", "recomputes"),
    _symbol("tensor_parallel.get_cuda_rng_tracker", "", "random states of sequence parallelism"),
    _symbol("tensor_parallel.random.get_cuda_rng_tracker", "", "recomputes"),
    _symbol("tensor_parallel.random.CheckpointWithoutOutput", "fp8", "discards norms"),
    _symbol("tensor_parallel.random.HAVE_TE", "", "discards norms"),
    _symbol("utils.make_viewless_tensor", "inp requires_grad keep_graph", "ends a stage"),
    _symbol("optimizer.get_megatron_optimizer", "config model_chunks", "trains"),
    _symbol("optimizer.OptimizerConfig", "lr min_lr", "multipliers of the optimizer"),
    _symbol("optimizer.ParamKey", "with_name_predicate", "multipliers of the optimizer"),
    _symbol("optimizer.get_standard_config_overrides", "config", "multipliers of the optimizer"),
    _symbol(
        "optimizer.optimizer_config.ParamWithNamePredicate",
        "name fn",
        "multipliers of the optimizer",
    ),
    _symbol("optimizer_param_scheduler.ParamGroupOverride", "", "multipliers of the optimizer"),
    _symbol(f"{_HALF}.sharded_state_dict", "model_sharded_state_dict", "replaced"),
    _symbol(f"{_HALF}.load_state_dict", "state_dict", "replaced"),
    _symbol(
        "optimizer.distrib_optimizer.DistributedOptimizer._build_optimizer_group_ranges",
        "param_groups gbuf_ranges",
        "replaced",
    ),
    _symbol(
        "transformer.multi_token_prediction.MultiTokenPredictionLayer",
        "",
        "tells the layers of multi-token prediction",
    ),
    _symbol("fp8_utils.get_fp8_context", "config layer_no", "--fp8-format", optional=True),
    _symbol("fp4_utils.get_fp4_context", "config layer_no", "--fp4-format", optional=True),
    HostSymbol(
        f"{_TE}.te_checkpoint",
        ("forward_func", "distribute_saved_activations", "get_rng_state_tracker", "tp_group"),
        "recomputes with fp8",
        optional=True,
    ),
    HostSymbol(f"{_TE}.set_save_original_input", ("module",), "fp8 with mix, group", optional=True),
    *(
        HostSymbol(path, tuple(parameters.split()), LAUNCHES, optional=True)
        for path, parameters in (
            (f"{_CORE}.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb", ""),
            (f"{_CORE}.num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR", ""),
            (f"{_CORE}.tokenizers.utils.build_tokenizer.build_tokenizer", "args"),
            (f"{_CORE}.tokenizers.utils.build_tokenizer.vocab_size_with_padding", "args"),
            (f"{_TRAINING}.arguments.core_transformer_config_from_args", "args"),
            (f"{_TRAINING}.checkpointing.load_args_from_checkpoint", "args"),
            (f"{_TRAINING}.global_vars._GLOBAL_ARGS", ""),
        )
    ),
    *(
        HostSymbol(path, tuple(parameters.split()), REHEARSES, optional=True)
        for path, parameters in (
            (f"{_CORE}.rerun_state_machine.RerunDataIterator", "iterable"),
            (f"{_CORE}.{_SCHEDULES}.backward_step", "input_tensor output_tensor"),
            (f"{_CORE}.{_SCHEDULES}.forward_step", "model"),
            (f"{_CORE}.tensor_parallel.layers._grad_accum_fusion_available", ""),
            (f"{_CORE}.tensor_parallel.random._set_cuda_rng_state", ""),
            (f"{_CORE}.tensor_parallel.random.CudaRNGStatesTracker.fork", ""),
            (f"{_CORE}.transformer.dot_product_attention.DotProductAttention.forward", ""),
            (f"{_CORE}.transformer.moe.router.TopKRouter.routing", ""),
            (f"{_TRAINING}.get_args", ""),
            (f"{_TRAINING}.global_vars.init_num_microbatches_calculator", ""),
            (f"{_TRAINING}.initialize._compile_dependencies", ""),
            (f"{_TRAINING}.initialize._initialize_tp_communicators", ""),
            (f"{_TRAINING}.training.build_train_valid_test_data_iterators", ""),
            (f"{_TRAINING}.training.train_step", ""),
        )
    ),
    HostSymbol(
        f"{_TRAINING}.arguments.add_megatron_arguments",
        ("parser",),
        "replaced: adds our flags (python -m megatron_residuals.run)",
        optional=True,
    ),
    HostSymbol(
        f"{_TRAINING}.training.get_megatron_optimizer_config",
        ("args",),
        "replaced: --residual-lr-mult, --residual-wd-mult",
        optional=True,
    ),
    HostSymbol(
        f"{_TRAINING}.training.training_log",
        ("iteration", "loss_dict"),
        "replaced: --residual-log-interval",
        optional=True,
    ),
    HostSymbol(
        f"{_TRAINING}.training.setup_model_and_optimizer",
        (),
        "replaced: sees that the model has its residual (python -m megatron_residuals.run)",
        optional=True,
    ),
)


def _resolve(path: str) -> Any:
    """The object of a dotted path: modules as far as there are any, then attributes."""
    words = path.split(".")
    for length in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        for word in words[length:]:
            found = getattr(found, word)
        return found
    raise ImportError(f"no module {words[0]}")


def symbol_table() -> list[dict[str, str]]:
    """A row for every symbol: state (ok, missing, or absent where optional), path, use, fault."""
    rows = []
    for symbol in SYMBOLS:
        fault = symbol.fault()
        state = "ok" if fault is None else "absent" if symbol.optional else "missing"
        rows.append({"state": state, "path": symbol.path, "use": symbol.use, "fault": fault or ""})
    return rows
