# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT with stock Megatron-Core (0.17, 0.18, 0.19), straight from the wheel.

The wheel carries ``megatron.training`` but no entry script, so here is one: dense and MoE decoders,
real (``--data-path``) or mock data, any TP/PP/VPP/CP/EP layout, ``--spec``. It knows nothing of
residual connections: run it by itself, or unchanged through ``python -m megatron_residuals.run``.
"""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
)
from megatron.training import (
    get_args,
    get_timers,
    inprocess_restart,
    pretrain,
    print_rank_0,
)
from megatron.training import utils as training_utils
from megatron.training.arguments import core_transformer_config_from_args

ARGS_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

# What Megatron's own pretrain_gpt.py does beyond this script. Ignoring one of these would train
# something else than was asked for, so they are refused.
REFUSED_ARGS = ("sft", "fim_data", "hybrid_context_parallel")
REFUSED_ARGS += ("dataloader_inter_document_masking",)
# From 0.19 on the host builds the model and handles these itself.
REFUSED_ARGS_WITH_PROVIDER = ("experimental_attention_variant", "heterogeneous_layers_config_path")
REFUSED_ARGS_WITH_PROVIDER += ("yaml_cfg", "use_legacy_models")

# --transformer-impl -> middle of the names of Megatron's functions that build its layer spec.
LAYER_KINDS = {
    "local": "local",
    "transformer_engine": "with_transformer_engine",
    "inference_optimized": "with_inference",
}
# GPTDatasetConfig field -> argument, where the two names differ.
DATASET_ARGS = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}
BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
SPIKE_FACTOR = 10  # a loss this many times the largest one seen so far counts as a spike

stimer = StragglerDetector()  # one per process; Megatron switches it on with --log-straggler

Batch = dict[str, torch.Tensor | None]
LayerSpec = ModuleSpec | TransformerBlockSubmodules


def refuse_unsupported(args: Namespace, names: tuple[str, ...]) -> None:
    """Raise ValueError naming every argument of ``names`` that is switched on."""
    given = [name for name in names if getattr(args, name, None)]
    if given:
        raise ValueError(
            f"examples/pretrain_gpt.py does not implement {given}. Leave them out, or run the "
            "pretrain_gpt.py of a Megatron-LM checkout in its place."
        )


def stock_layer_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> LayerSpec:
    """The layers Megatron's own GPT script builds for these arguments (0.17 and 0.18)."""
    if args.spec is not None:
        return import_module(args.spec)
    use_te = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    kind = LAYER_KINDS[args.transformer_impl]
    submodules = getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_submodules")
    # Every switch of the spec is a config field of the same name; which ones exist depends on the
    # version. fp8 is a leftover that only warns.
    switches = [name for name in inspect.signature(submodules).parameters if name != "fp8"]
    options = {name: getattr(config, name) for name in switches if hasattr(config, name)}
    return getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_spec")(**options)


def prediction_spec(
    args: Namespace, config: TransformerConfig, layer_spec: LayerSpec, vp_stage: int | None
) -> ModuleSpec | None:
    """The layers of multi-token prediction, like those of the decoder; None without it."""
    if not args.mtp_num_layers:
        return None
    if args.spec is not None:  # which may name more than layers
        args = Namespace(**{**vars(args), "spec": None})
        layer_spec = stock_layer_spec(args, config, vp_stage)
    use_te = args.transformer_impl == "transformer_engine"
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layer_spec, use_transformer_engine=use_te, vp_stage=vp_stage
    )


def predicts_here(vp_stage: int | None) -> bool:
    """Whether this stage predicts several tokens, for which it needs the inputs as well."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    return bool(get_args().mtp_num_layers) and last


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """Build one pipeline stage (0.17 and 0.18; from 0.19 on the host's own builder does it)."""
    args = get_args()
    refuse_unsupported(args, REFUSED_ARGS + REFUSED_ARGS_WITH_PROVIDER)
    config = config or core_transformer_config_from_args(args)
    layer_spec = stock_layer_spec(args, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        mtp_block_spec=prediction_spec(args, config, layer_spec, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def read_batch_on_tp_rank(data_iterator: Iterator[Batch] | None, predicts: bool) -> Batch:
    """Next micro-batch, read on the first tensor-parallel rank and broadcast (from 0.18 on)."""
    from megatron.core.utils import get_batch_on_this_tp_rank

    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        present = [key for key in BATCH_KEYS if sample.get(key) is not None]
        batch = dict.fromkeys(BATCH_KEYS)
        batch |= {key: sample[key].cuda(non_blocking=True) for key in present}
    parameters = inspect.signature(get_batch_on_this_tp_rank).parameters
    packed = "has_cu_seqlens" if "has_cu_seqlens" in parameters else "is_sft"
    return get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
        **{packed: False},
    )


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """This rank's part of the next micro-batch, tensors ``[b, s / cp]``; None on inner stages."""
    if not training_utils.is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    if hasattr(training_utils, "get_batch_on_this_tp_rank"):  # up to 0.17
        predicts = predicts_here(vp_stage)
        batch = training_utils.get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=predicts)
        return get_batch_on_this_cp_rank(batch)
    batch = read_batch_on_tp_rank(data_iterator, predicts_here(vp_stage))
    cp_group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss, number of tokens it is summed over, and both again as the reported metric."""
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    validate = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            validate(rejection_func=is_bad, message=f"{name} in the local loss", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(
            get_rerun_state_machine().is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"
        )
        validate(rejection_func=is_spike, message="spike in the local loss", fatal=False)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: GPTModel, return_schedule_plan: bool = False
) -> tuple[object, Callable[[torch.Tensor], object]]:
    """One micro-batch through one stage; the signature is the one Megatron's schedules call."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    with stimer:
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """The data arguments as a GPTDatasetConfig with whatever fields this version has."""
    blend, blend_per_split = training_utils.get_blend_and_blend_per_split(args)
    counts = args.per_dataset_sequences_path
    options = {
        "blend": blend,
        "blend_per_split": blend_per_split,
        "tokenizer": build_tokenizer(args),
        "sequences_per_dataset": json.loads(Path(counts).read_text()) if counts else None,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    for field in fields(GPTDatasetConfig):
        argument = DATASET_ARGS.get(field.name, field.name)
        if field.init and field.name not in options and hasattr(args, argument):
            options[field.name] = getattr(args, argument)
    return GPTDatasetConfig(**options)


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Only ranks that feed tokens or labels to the model read the data."""
    first_tp_rank = parallel_state.get_tensor_model_parallel_rank() == 0
    return first_tp_rank and training_utils.is_first_or_last_pipeline_stage(vp_stage)


def train_valid_test_datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> list[GPTDataset | None]:
    """Train, validation and test data sets of ``num_samples`` sequences each."""
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(is_dataset_built_on_rank, vp_stage=vp_stage),
        dataset_config(args),
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


def main(
    model_provider: Callable[..., torch.nn.Module] = model_provider,
    config_from_args: str = "gpt_config_from_args",
    refused_args: tuple[str, ...] = REFUSED_ARGS,
) -> None:
    """Call ``megatron.training.pretrain`` the way the installed version wants it.

    Args:
        model_provider: builds one pipeline stage up to 0.18.
        config_from_args: the host's function that describes the model from 0.19 on.
        refused_args: arguments that this script would ignore.
    """
    train_valid_test_datasets_provider.is_distributed = True
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    call = {
        "train_valid_test_dataset_provider": train_valid_test_datasets_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "store": store,
    }
    takes = inspect.signature(pretrain).parameters
    if "cfg_container" not in takes:  # up to 0.17
        run(**call, model_provider=model_provider, args_defaults=ARGS_DEFAULTS)
        return
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults=ARGS_DEFAULTS)
    refuse_unsupported(args, refused_args)
    if takes["model_provider"].default is None:  # from 0.19 on
        model_config = getattr(argument_utils, config_from_args)(args)
        run(argument_utils.pretrain_cfg_container_from_args(args, model_config), **call)
    else:
        container = argument_utils.pretrain_cfg_container_from_args(args)
        run(cfg_container=container, **call, model_provider=model_provider)


if __name__ == "__main__":
    main()
