# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which replacements make up the CPU host, in what order, and the report on them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch

from megatron_residuals.cpu_host import (
    device_mapping,
    host_repairs,
    mixers,
    speed_only,
    te_extension,
)

Step = Callable[[], str | None]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `install` replaced, one line each, under three labels that must not be mixed up."""

    device_mapping: tuple[str, ...] = ()
    """CUDA calls and arguments that the CPU answers."""
    host_repairs: tuple[str, ...] = ()
    """Defects of the host without Transformer Engine or Apex: GPU users meet these, unrepaired."""
    speed_only: tuple[str, ...] = ()
    """Changes no number."""

    def __add__(self, other: Report) -> Report:
        return Report(
            self.device_mapping + other.device_mapping,
            self.host_repairs + other.host_repairs,
            self.speed_only + other.speed_only,
        )

    def __str__(self) -> str:
        if self == Report():
            return "CPU host: nothing replaced (a GPU is present)"
        labels = (
            ("CUDA calls answered by the CPU", self.device_mapping),
            ("Host defects repaired here, present on GPUs too", self.host_repairs),
            ("For speed only", self.speed_only),
        )
        lines = ["CPU host for Megatron-Core:"]
        for label, entries in labels:
            lines.append(f"  {label}:")
            lines.extend(f"    - {entry}" for entry in entries or ("nothing",))
        return "\n".join(lines)


_installed: Report | None = None
_training_installed = False


def install(*, training: bool = False) -> Report:
    """Makes this process able to run Megatron-Core on the CPU, and says what it replaced.

    Does nothing, and returns an empty report, when `torch.cuda.is_available()`. Calling it again
    changes nothing and returns the same report. It imports `megatron.core`.

    Args:
        training: also prepare `megatron.training.pretrain` (0.17 to 0.19; needs
            `--distributed-backend gloo`). May be asked for in a later call.

    Raises:
        RuntimeError: `megatron.core` was imported first, and has already bound what had to be
            replaced; or `training` is wanted and this Megatron-Core has no `megatron.training`.
    """
    global _installed, _training_installed
    if torch.cuda.is_available():
        return Report()
    if _installed is None:
        _refuse_if_megatron_is_loaded()
        _installed = _apply(
            mapping=(
                device_mapping.map_cuda_functions,
                device_mapping.map_all_to_all_splits,
                device_mapping.map_device_arguments,
                te_extension.supply_extension,
            ),
            repairs=(host_repairs.add_typing_override, host_repairs.stub_paged_stash),
            speed=(speed_only.disable_torch_compile,),
        ) + _apply(
            mapping=(
                mixers.supply_mixer_kernels,
                device_mapping.map_megatron_rng,
                device_mapping.map_inference_messages,
            ),
            repairs=(
                host_repairs.tag_torch_norm,
                host_repairs.norm_hybrid_stacks,
                host_repairs.localise_hybrid_layers,
                host_repairs.repair_checkpoint_without_output,
                host_repairs.define_te_general_gemm,
                host_repairs.repair_process_memory,
                host_repairs.repair_distributed_optimizer,
            ),
            speed=(speed_only.fork_checkpoint_queue, speed_only.share_storage_in_python),
        )
    if training and not _training_installed:
        _refuse_without_training()
        _installed += _apply(
            mapping=(device_mapping.map_training,), repairs=(host_repairs.skip_compile_helpers,)
        )
        _training_installed = True
    return _installed


def _apply(
    *, mapping: tuple[Step, ...] = (), repairs: tuple[Step, ...] = (), speed: tuple[Step, ...] = ()
) -> Report:
    def lines(steps: tuple[Step, ...]) -> tuple[str, ...]:
        return tuple(line for step in steps if (line := step()) is not None)

    return Report(lines(mapping), lines(repairs), lines(speed))


def _refuse_if_megatron_is_loaded() -> None:
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "cpu_host.install() was called after megatron.core had been imported, which binds "
            "torch.compile and torch.cuda at import. Call install() before the first import of "
            "megatron (in a test suite: at the top of conftest.py)."
        )


def _refuse_without_training() -> None:
    import importlib.util

    if importlib.util.find_spec("megatron.training") is None:
        from megatron.core import __version__

        raise RuntimeError(
            f"cpu_host.install(training=True) needs megatron.training, which Megatron-Core "
            f"{__version__} as installed does not contain. Wheels from 0.17 on do; for 0.16 put a "
            "Megatron-LM source tree of the same version on PYTHONPATH."
        )
