# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which of a launch's settings a prediction of activations and messages does not take into account.

Every field of the host's configuration is counted, or changes nothing that is predicted, or is
named when it is on. One that stands in none of these lists, which may be of a newer host, is named
when it differs from its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import re
from typing import Any

COUNTED = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
    gated_linear_unit qk_layernorm normalization attention_backend transformer_impl
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    num_moe_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size
    moe_layer_freq
    tensor_model_parallel_size sequence_parallel context_parallel_size
    pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    pipeline_model_parallel_layout num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage
    overlap_p2p_comm overlap_p2p_comm_warmup_flush params_dtype pipeline_dtype bf16 fp16
    recompute_granularity recompute_method recompute_num_layers recompute_modules is_hybrid_model
"""
# Numbers that change no size; how something is computed or sent, not what is kept of it; weights
# and their gradients; inference; details of what is named.
HARMLESS = """
    init_method* output_layer_init_method embedding_init_method* init_model_with_meta_device
    perform_initialization use_cpu_initialization use_mup mup_*
    layernorm_epsilon layernorm_zero_centered_gamma softmax_scale softmax_type
    apply_query_key_layer_scaling attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul
    activation_func add_bias_linear add_qkv_bias test_mode calculate_per_token_loss
    qk_clip* log_max_attention_logit window_size window_attn_skip_freq config_logger_dir
    rotary_base rotary_scaling_factor rope_type original_max_position_embeddings beta_fast beta_slow
    mscale mscale_all_dim mrope_section cache_mla_latents mla_down_proj_fusion
    rotary_interleaved rotary_percent no_rope_freq attention_dropout
    bias_activation_fusion masked_softmax_fusion apply_rope_fusion fused_single_qkv_rope
    bias_dropout_fusion persist_layer_norm cross_entropy_loss_fusion cross_entropy_fusion_impl
    flash_attention_version batch_invariant_mode deterministic_mode
    moe_router_load_balancing_type moe_router_topk_limited_devices moe_router_num_groups
    moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
    moe_router_bias_update_rate moe_router_quantile_balancing_ema moe_router_force_load_balancing
    moe_router_force_biased moe_router_fusion moe_aux_loss_coeff moe_z_loss_coeff
    moe_input_jitter_eps moe_token_dropping moe_token_drop_policy moe_token_dispatcher_type
    moe_enable_deepep moe_deepep_* moe_hybridep_* moe_flex_* moe_ncclep_* moe_per_layer_logging
    moe_grouped_gemm moe_single_grouped_* moe_permute_* moe_enable_routing_replay
    moe_shared_expert_gate moe_shared_expert_overlap moe_shared_expert_glu_interleave_size
    moe_mlp_glu_interleave_size moe_apply_probs_on_input moe_pad_experts_for_cuda_graph_inference
    use_grouped_gemm_for_shared_expert use_fused_weighted_squared_relu
    high_priority_a2a_comm_stream overlap_dispatch_backward_with_experts_wgrad
    mtp_* linear_* dsa_* experimental_attention_variant_* mamba_* use_mamba_mem_eff_path
    fp8_* fp4_* tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16 use_kitchen_attention kitchen_*
    cuda_graph_* inference_* use_inference_optimized_layers flash_decode symmetric_ar_type
    nccl_all_reduce_for_prefill mlp_chunks_for_prefill use_te_rng_tracker
    hetereogenous_dist_checkpoint heterogeneous_layers_config_* per_block_parameters
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    gtp_weight_remat_size expert_gtp_weight_remat_size expert_model_parallel_size
    expert_tensor_parallel_size pipeline_model_parallel_comm_backend
    hierarchical_context_parallel_sizes tp_comm_* batch_p2p_* use_ring_exchange_p2p
    deallocate_pipeline_outputs timers barrier_with_L1_time autocast_dtype
    finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
    grad_sync_func param_sync_func gradient_accumulation_fusion wgrad_deferral_limit
    disable_parameter_transpose_cache clone_scatter_output_in_embedding
    offload_modules min_offloaded_tensor_size cpu_offloading_* _cpu_offloading_context
    delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction
    fine_grained_offloading_max_inflight_offloads moe_paged_stash_*
"""
NAMED = """
    mtp_num_layers mtp_standalone hidden_dropout fp32_residual_connection
    apply_residual_connection_post_layernorm glu_linear_offset activation_func_clamp_value
    activation_func_fp8_input_store use_te_activation_func qk_l2_norm attention_output_gate
    experimental_attention_variant memory_efficient_layer_norm fused_residual_rmsnorm
    use_transformer_engine_op_fuser distribute_saved_activations fp8 fp4 use_kitchen quant_recipe
    moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity
    moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_layer_recompute
    moe_latent_size moe_paged_stash use_grouped_gemm_for_dense_mlp cp_comm_type
    enable_cuda_graph external_cuda_graph cuda_graph_impl
    heterogeneous_block_specs fine_grained_activation_offloading cpu_offloading
    hybrid_context_parallel max_seqlen_per_dp_cp_rank enable_autocast variable_seq_lengths
    num_microbatches_with_partial_activation_checkpoints
    defer_embedding_wgrad_compute delay_wgrad_compute overlap_moe_expert_parallel_comm
    ep_overlap_early_attn_memory_release
"""
# Named for local layers too, which are counted without any fused operation.
NAMED_LOCALLY = """
    attention_dropout bias_activation_fusion masked_softmax_fusion apply_rope_fusion
    fused_single_qkv_rope no_rope_freq multi_latent_attention qk_layernorm
"""
# Arguments beside the configuration.
ARGUMENTS = """
    freeze_all_layers sft dataloader_inter_document_masking perform_rl_step skip_train
    use_legacy_models yaml_cfg
"""
OFF: tuple[object, ...] = (None, False, 0, "none", [], (), "p2p")
LONGEST = 40  # characters of a value


def passed_over(args: argparse.Namespace, config: Any) -> list[str]:
    """``name = value`` of every setting that is on and that a prediction leaves out."""
    named = NAMED + (NAMED_LOCALLY if config.transformer_impl == "local" else "")
    fields = {field.name: field for field in dataclasses.fields(config)}
    found = {name: getattr(config, name) for name in fields if _is_in(name, named)}
    found |= {name: getattr(args, name, None) for name in ARGUMENTS.split()}
    on = {name: value for name, value in found.items() if value not in OFF}
    for name, field in fields.items():
        value = getattr(config, name)
        if not is_known(name) and value != _default(field):
            on[name] = value
    return [f"{name} = {_short(value)}" for name, value in on.items()]


def is_known(field: str) -> bool:
    """Whether a field of the host's configuration stands in one of the lists."""
    return any(_is_in(field, names) for names in (COUNTED, HARMLESS, NAMED))


def _is_in(field: str, names: str) -> bool:
    return _pattern(names).match(field) is not None


@functools.cache
def _pattern(names: str) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, names.split())))


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
