# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Collects a run's summary from the live models of this process."""

from __future__ import annotations

import atexit
from pathlib import Path

import torch.distributed as dist

from megatron_residuals.diagnostics.depth_weights import DepthWeightRecorder
from megatron_residuals.diagnostics.summary import RunSummary
from megatron_residuals.mcore import block as block_module
from megatron_residuals.mcore.block import ResidualTransformerBlock


class RunObserver:
    """Watches every block that is built from now on, and writes the summary when Python exits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recorder = DepthWeightRecorder()
        self._blocks: list[ResidualTransformerBlock] = []
        self._rank = 0
        block_module.observers.append(self._observe)
        atexit.register(self.write)

    def _observe(self, block: ResidualTransformerBlock) -> None:
        self._blocks.append(block)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        for layer in block.layers:
            first = 2 * (layer.layer_number - 1)
            self._recorder.watch(layer.self_attention_residual, first)
            self._recorder.watch(layer.mlp_residual, first + 1)
        self._recorder.watch(block.residual_head, 2 * block.config.num_layers)

    def write(self) -> None:
        """Write this rank's part; nothing when no model with a residual was built."""
        if self._blocks:
            self.summary().write(self._folder, self._rank)

    def summary(self) -> RunSummary:
        """This rank's part of the summary."""
        block = self._blocks[0]
        parameters = {
            name: parameter.numel()
            for owner in self._blocks
            for name, parameter in owner.residual_parameters()
        }
        return RunSummary(
            mechanism=block.residual.mechanism,
            config=str(block.residual),
            num_sublayers=2 * block.config.num_layers,
            parameters=parameters,
            bytes_per_step=sum(block.stage_io.route.training_bytes.values()),
            depth_weights=self._recorder.means(),
        )
