# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Repairs of Megatron-Core as installed without Transformer Engine, Apex, triton or psutil.

These defects are not the CPU's: a GPU user without those packages meets them too, and there
nothing repairs them, because `install()` does nothing on a GPU. Each function says why it is
needed, patches only where it finds the defect, and returns one line for the report, or None.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import typing
from typing import Any

import torch


def add_typing_override() -> str | None:
    """Megatron-Core 0.19 takes `override` from `typing`, where Python 3.11 has none."""
    if hasattr(typing, "override"):
        return None
    import typing_extensions

    typing.override = typing_extensions.override
    return "typing.override: from typing_extensions (Python < 3.12)"


def stub_paged_stash() -> str | None:
    """From 0.18 the schedules import a Triton MoE module, and triton is no declared dependency."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is not None or name in sys.modules:
        return None
    stub = types.ModuleType(name)
    vars(stub).update(
        GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None
    )
    sys.modules[name] = stub
    return f"{name}: stub, triton is not installed"


def tag_torch_norm() -> str:
    """Torch norms lack only the `sequence_parallel` tag for which their gradients are summed."""
    from megatron.core.transformer import torch_norm

    original = torch_norm.WrappedTorchNorm.__new__

    @functools.wraps(original)
    def new_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm: torch.nn.Module = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new_norm
    return "WrappedTorchNorm: sequence_parallel accepted, and tagged on the norm's parameters"


def norm_hybrid_stacks() -> str | None:
    """Whatever the spec, a stack of Mamba and attention names TENorm for its final norm."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.ssm.mamba_block import MambaStack
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if HAVE_TE:
        return None
    sys.modules[MambaStack.__module__].TENorm = WrappedTorchNorm
    return f"{MambaStack.__name__}: a torch norm at its end, Transformer Engine is not installed"


def localise_hybrid_layers() -> str | None:
    """The host's own spec of hybrid models, which is in its scripts, has no other kind of layer."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    from megatron_residuals.cpu_host.local_stack import local_stack_spec

    if HAVE_TE:
        return None
    mamba_stack_spec.submodules = local_stack_spec().submodules
    return "hybrid_stack_spec: local layers, Transformer Engine is not installed"


def repair_checkpoint_without_output() -> str | None:
    """`CheckpointWithoutOutput()` takes its default `fp8=False` for a wish for fp8: NameError."""
    from megatron.core.tensor_parallel import random as host_random

    if host_random.HAVE_TE:
        return None
    original = host_random.CheckpointWithoutOutput.__init__

    @functools.wraps(original)
    def init(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, fp8 or None, *args, **kwargs)

    host_random.CheckpointWithoutOutput.__init__ = init
    return "CheckpointWithoutOutput: fp8=False means no fp8"


def define_te_general_gemm() -> str | None:
    """0.16 tests `te_general_gemm is not None` in the MoE router without having defined it."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "te_general_gemm"):
        return None
    moe_utils.te_general_gemm = None
    return "moe_utils.te_general_gemm: None"


def repair_process_memory() -> str | None:
    """Without psutil the checkpoint writer raises in a thread for a debug line, and 0.16 hangs."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async.HAVE_PSUTIL:
        return None
    filesystem_async._process_memory = lambda: 0
    return "filesystem_async._process_memory: 0, psutil is not installed"


def repair_distributed_optimizer() -> str | None:
    """Torch's AdamW keeps `step` per parameter, which DistributedOptimizer's loading trips over."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return None
    optimizer_class = distrib_optimizer.DistributedOptimizer
    _initialise_state_before_loading(optimizer_class)
    _set_states_without_step(optimizer_class)
    _own_step_after_loading(optimizer_class)
    return "DistributedOptimizer: loads into torch's AdamW (state exists, `step` kept, not shared)"


def _initialise_state_before_loading(optimizer_class: type[Any]) -> None:
    """A fresh optimizer has no `step`: its state_dict() dies in `assert len(steps) == 1`."""
    original = optimizer_class.sharded_state_dict

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and len(self.optimizer.state) == 0:
            self._init_optimizer_states_with_dummy_values()
        return original(self, model_state, is_loading, *args, **kwargs)

    optimizer_class.sharded_state_dict = sharded_state_dict


def _set_states_without_step(optimizer_class: type[Any]) -> None:
    """The host wants `step` of the checkpoint (KeyError) and writes into leaf parameters."""

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        targets = {"param": main_param, **self.optimizer.state[main_param]}
        with torch.no_grad():
            for key, target in targets.items():
                if key != "step" and isinstance(tensors.get(key), torch.Tensor):
                    target.copy_(tensors[key])

    optimizer_class._set_main_param_and_optimizer_states = set_states


def _own_step_after_loading(optimizer_class: type[Any]) -> None:
    """The host gives all parameters one `step` tensor: it then advances once per parameter."""
    original = optimizer_class.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    optimizer_class.load_state_dict = load_state_dict


def skip_compile_helpers() -> str | None:
    """The wheel ships the dataset helper compiled, without a Makefile: the host's `make` exits."""
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return None
    utils.compile_helpers = lambda: None
    return "compile_helpers: skipped, helpers_cpp is already built"
