# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` and `device="cuda"` answered by the CPU, for Megatron-Core where there is no GPU.

The host asks `torch.cuda` for a device, a stream, a generator or a memory figure, and gets the CPU,
a null object, the CPU's default generator, or zero. `torch.cuda.is_available()` stays false. Of
Megatron-Core itself only the random-state accessors and the entry to training are replaced here.
gloo needs nothing.

Every replaced function is an object of its own: dynamo's table refuses one object under two names.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_residuals.function_modes import ThroughBackward

CPU = torch.device("cpu")


class NullStream:
    """A CUDA stream on a machine that runs every operation in program order."""

    device = CPU
    priority = 0
    stream_id = 0
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def wait_stream(self, stream: object) -> None:
        return None

    def wait_event(self, event: object) -> None:
        return None

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        """The event, or a new one, at the end of the stream's work: now."""
        event = NullEvent() if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class NullEvent:
    """A CUDA event; it keeps the wall clock, so that `elapsed_time` (ms) still means something."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.recorded_s = 0.0

    def record(self, stream: object = None) -> None:
        self.recorded_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: NullEvent) -> float:
        return (end.recorded_s - self.recorded_s) * 1e3


def _answers(value: object = None) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _null_context() -> Callable[..., Any]:
    return lambda *args, **kwargs: contextlib.nullcontext()


def _seed_cpu() -> Callable[[int], Any]:
    return lambda seed: torch.default_generator.manual_seed(int(seed))


def _cuda_functions() -> dict[str, Callable[..., Any]]:
    stream = NullStream()
    return {
        "current_device": _answers(CPU),
        "set_device": _answers(),
        "synchronize": _answers(),
        "empty_cache": _answers(),
        "ipc_collect": _answers(),
        "device": _null_context(),
        "Stream": NullStream,
        "ExternalStream": NullStream,
        "Event": NullEvent,
        "stream": _null_context(),
        "set_stream": _answers(),
        "current_stream": _answers(stream),
        "default_stream": _answers(stream),
        "is_current_stream_capturing": _answers(False),
        "manual_seed": _seed_cpu(),
        "manual_seed_all": _seed_cpu(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "initial_seed": torch.initial_seed,
        "memory_allocated": _answers(0),
        "memory_reserved": _answers(0),
        "max_memory_allocated": _answers(0),
        "max_memory_reserved": _answers(0),
        "reset_peak_memory_stats": _answers(),
        "memory_stats": lambda *args, **kwargs: collections.defaultdict(int),
        "mem_get_info": _answers((1 << 34, 1 << 34)),
        "device_memory_used": _answers(0),
        "utilization": _answers(0),
        "temperature": _answers(0),
        "power_draw": _answers(0),
        "clock_rate": _answers(0),
    }


class CpuTypeName(str):
    """`torch.FloatTensor` that equals `torch.cuda.FloatTensor`, to which the host compares it."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        as_cuda = self.replace("torch.", "torch.cuda.", 1)
        return str.__eq__(self, other) is True or str.__eq__(as_cuda, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, int):  # the index of a GPU
        return True
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaArgumentsToCpu(ThroughBackward):
    """Runs `f(..., device="cuda")`, `.to("cuda")`, `.cuda()` and pinning on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return CpuTypeName(func(*args))
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def map_cuda_functions() -> str:
    """The host calls `torch.cuda.*` without asking whether a GPU is there."""
    functions = _cuda_functions()
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.cuda.random.get_rng_state = functions["get_rng_state"]
    torch.cuda.random.set_rng_state = functions["set_rng_state"]
    nvtx = torch.cuda.nvtx
    nvtx.range_push, nvtx.range_pop, nvtx.mark = _answers(), _answers(), _answers()
    nvtx.range = _null_context()
    return (
        "torch.cuda: device -> cpu; streams, events, nvtx -> null objects; generator -> the CPU's; "
        "figures of memory, load, heat and power -> 0"
    )


def map_device_arguments() -> str:
    """The host writes `device="cuda"`, `.cuda()` and `pin_memory=True` in many places."""
    CudaArgumentsToCpu().__enter__()
    return 'device="cuda", .cuda(), pin_memory, record_stream, Tensor.type() -> cpu (main thread)'


def map_all_to_all_splits() -> str:
    """On CPU the MoE dispatcher's split sizes stay tensors, which `all_to_all_single` refuses."""
    original = torch.distributed.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        splits = as_list(output_split_sizes), as_list(input_split_sizes)
        return original(output, input, *splits, *args, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single
    return "torch.distributed.all_to_all_single: tensor split sizes -> lists"


def map_inference_messages() -> str:
    """The host asserts that what stages send each other while generating lies on a GPU."""
    from megatron.core.inference import communication_utils

    communication_utils._is_cuda = _answers()
    communication_utils._is_cuda_contiguous = _answers()
    return "megatron.core.inference.communication_utils: tensors need not be on a GPU"


def map_megatron_rng() -> str:
    """The host reads CUDA generators directly; here the one generator is the CPU's."""
    from megatron.core.tensor_parallel import random as host_random

    host_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    host_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The host warns whenever the CPU state changes inside its "GPU" context: here always.
    logging.getLogger(host_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    return "megatron.core.tensor_parallel.random: CUDA generator state -> the CPU's"


def map_training() -> str:
    """`megatron.training` asserts CUDA, skips set-up without devices, asks for an architecture."""
    from megatron.training import arguments, initialize, training

    training.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    # With no device the host skips initialize_model_parallel and the seed.
    torch.cuda.device_count = _answers(1)
    # Asked for with tensor or context parallelism only; 9 (Hopper) also wants the variable below.
    arguments.get_device_arch_version = _answers(9)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Asked for with --moe-grouped-gemm; the local layers run expert by expert with it or without.
    torch.cuda.get_device_capability = _answers((9, 0))
    return (
        "megatron.training: allow_no_cuda, device_count -> 1, device architecture -> 9.0 "
        "(--moe-grouped-gemm is taken, and experts run one by one)"
    )
