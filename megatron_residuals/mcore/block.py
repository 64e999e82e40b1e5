# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A stack of layers that carries a residual state through them and across stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import WrappedTensor
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mcore.compat import outer_quantization_context, stage_layout
from megatron_residuals.mcore.inference import check_context
from megatron_residuals.mcore.layer import parameter_device, tag_parameters
from megatron_residuals.mcore.route import route_for
from megatron_residuals.mcore.runner import StageRunner
from megatron_residuals.mcore.spec import block_submodules
from megatron_residuals.mcore.stage_io import StageIO, Visit, fresh
from megatron_residuals.mcore.support import check_model
from megatron_residuals.mcore.training.checkpoint import record_for, refuse_mechanism
from megatron_residuals.mcore.training.warm_start import keep_initial_values
from megatron_residuals.modules import build_head, build_sublayer_residual, open_state
from megatron_residuals.pipeline.layout import StageLayout
from megatron_residuals.pipeline.plan import TransferPlan


class ResidualBlockMixin(MegatronModule):
    """Turns a host's stack of layers into one with an explicit residual state between its layers.

    The loop over the layers is ours, since the host's passes one hidden state; building layers,
    the final norm, checkpoints of parameters and everything inside a sublayer stay the host's.
    """

    final_norm_name: str
    """The attribute in which the host has the norm behind the last layer, if the stage has one."""
    layers: Any
    pg_collection: Any
    tp_group: Any
    pre_process: bool
    input_tensor: Tensor | None

    def _build_residual(
        self, residual: ResidualConfig, layout: StageLayout, vp_stage: int | None
    ) -> None:
        """Everything behind the host's own constructor; ``layout`` is of the whole model."""
        self.residual, self.vp_stage = residual, vp_stage
        pp_group, chunk = self.pg_collection.pp, vp_stage or 0
        route = route_for(residual, layout, self.config, pp_group, chunk)
        route.blocks.add(self)
        stage = route.plan.layout.stage(pp_group.rank(), chunk)
        self.stage_io = StageIO(route, stage)
        self._check_layers()
        self._give_residuals(route.plan)
        self.runner = StageRunner(
            residual, self.config, route.plan, stage, self.layers, self.tp_group
        )
        self.residual_settings = record_for(residual, layout, self.config, pp_group.rank(), chunk)
        plain = residual.entry.is_stock
        loading = refuse_mechanism if plain else keep_initial_values
        self.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]
        self._payload: Tensor | None = None

    def _check_layers(self) -> None:
        layout, first = self.stage_io.route.plan.layout, self.stage_io.layers_before
        numbers = range(first, first + self.stage_io.num_layers)
        planned = [(n + 1, len(layout.sublayers_of_layer(n))) for n in numbers]
        built = [(layer.layer_number, len(layer.parts)) for layer in self.layers]
        if built != planned:
            raise RuntimeError(
                f"stage {self.stage_io.stage} was built with layers {built} (numbers, sublayers), "
                f"but its pipeline layout says {planned}; this Megatron-Core splits layers in a "
                "way that megatron_residuals does not know"
            )

    def _give_residuals(self, plan: TransferPlan) -> None:
        """Every sublayer, and the end of the last one, gets what reads the state there."""
        options: dict[str, Any] = {
            "hidden_size": self.config.hidden_size,
            "device": parameter_device(self.config),
        }
        for layer in self.layers:
            layer.give_residuals(
                build_sublayer_residual(self.residual, plan.depth, sublayer=i, **options)
                for i in plan.layout.sublayers_of_layer(layer.layer_number - 1)
            )
        self.residual_head = None
        if self.stage_io.closes:
            self.residual_head = build_head(self.residual, plan.depth, **options)
            tag_parameters(self.residual_head, self.config)

    def residual_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters of the mechanism in this stage, with global layer indices in their names."""
        for layer in self.layers:
            for part, module in zip(layer.parts, layer.residuals, strict=True):
                for name, parameter in module.named_parameters():
                    yield f"layers.{layer.layer_number - 1}.{part}.{name}", parameter
        if self.residual_head is not None:
            yield from self.residual_head.named_parameters("residual_head")

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Take what the schedule received from the previous stage.

        The host reads the sequence length from ``input_tensor``, so that is one row of the payload.
        """
        self._payload = input_tensor
        self.input_tensor = input_tensor
        if input_tensor is not None and not self.pre_process:
            self.input_tensor = self.stage_io.hidden_row(input_tensor)

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Tensor | None,
        *,
        extract_layer_indices: Any = None,
        inference_params: Any = None,
        dynamic_inference_decode_only: bool | None = None,
        **arguments: Any,
    ) -> Tensor:
        """One stage: the embedding [s, b, h] or a payload -> a payload or the hidden state.

        Keyword arguments are those of the host's stack; they reach the layers unchanged.
        """
        context = arguments.get("inference_context") or inference_params
        if context is not None:
            check_context(context, self.config, self.stage_io.route)
            arguments["inference_context"] = context
        if extract_layer_indices:
            raise ValueError(
                "extract_layer_indices: between layers there is no single hidden state to extract"
            )
        arguments["attention_mask"] = attention_mask
        if isinstance(hidden_states, WrappedTensor):  # the host's way to free it early in inference
            hidden_states = hidden_states.unwrap()
        hidden = hidden_states if self.pre_process else self._payload
        assert hidden is not None  # the host's model and schedule give it
        self._payload = self.input_tensor = None
        # a pass that generates belongs to no step of a schedule
        visit = self.stage_io.begin() if context is None else Visit(0)
        entered = fresh(hidden)
        with self._rng_context(), outer_quantization_context(self.config):
            hidden = self._run(entered, visit, arguments)
        norm = getattr(self, self.final_norm_name, None)
        if norm is not None:
            hidden = norm(self._as_state(hidden, False))
        hidden = self._as_state(hidden, not self.post_process)
        if hidden is entered and not self.pre_process:
            # the schedules keep a stage's input and output apart, also where nothing lies between
            return hidden.clone()
        return fresh(hidden)

    def _run(self, hidden: Tensor, visit: Any, arguments: dict[str, Any]) -> Tensor:
        io = self.stage_io
        if io.receives:
            state = io.enter(hidden, visit)
        elif io.opens:
            state = open_state(self.residual, hidden)
        else:
            return hidden
        state = self.runner.run(state, arguments, training=self.training)
        return io.exit(state, visit) if self.residual_head is None else self.residual_head(state)

    def _as_state(self, hidden: Tensor, is_state: bool) -> Tensor:
        """In float32, where a float32 state flows between 16-bit layers; else in 16 bit there."""
        if not self.config.fp32_residual_connection:
            return hidden
        return hidden.to(torch.float32 if is_state else self.config.params_dtype)

    def _rng_context(self) -> AbstractContextManager[Any]:
        """The random states in which the host's stack runs its layers."""
        return nullcontext()


class ResidualTransformerBlock(ResidualBlockMixin, TransformerBlock):  # type: ignore[misc]
    """``TransformerBlock`` with a residual state.

    Raises:
        ValueError: the model uses something that a replaced residual does not support.
        RuntimeError: the host numbers its layers otherwise than its pipeline layout says.
    """

    final_norm_name = "final_layernorm"

    def __init__(self, config: Any, spec: Any, *args: Any, **kwargs: Any) -> None:
        vp_stage, groups = kwargs.get("vp_stage"), kwargs.get("pg_collection")
        submodules = block_submodules(spec, config, vp_stage, groups)
        check_model(config, submodules.layer_specs or (), submodules.residual)
        super().__init__(config, submodules, *args, **kwargs)
        layout = stage_layout(config, self.pg_collection.pp.size())
        self._build_residual(submodules.residual, layout, self.vp_stage)

    def _rng_context(self) -> AbstractContextManager[Any]:
        if self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return nullcontext()
