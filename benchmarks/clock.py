# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Times and memory of one training step of a callable, candidates in turns, on CPU or CUDA.

On a CPU with one thread, time is that which the process got: who else wanted the core is not in it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Forward = Callable[[], Sequence[Tensor]]


class Candidate(NamedTuple):
    """Something to measure.

    Attributes:
        forward: runs the forward pass anew and returns its outputs.
        leaves: whose gradients a backward pass computes.
        cotangents: one for each output.
    """

    forward: Forward
    leaves: Sequence[Tensor]
    cotangents: Sequence[Tensor]


class Measured(NamedTuple):
    """Medians over the rounds, in milliseconds; memory of one step, in MiB."""

    forward_ms: float
    backward_ms: float
    saved_mib: float
    peak_mib: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


def measure(
    candidates: Mapping[str, Candidate], *, rounds: int, warm_up: int = 2
) -> dict[str, Measured]:
    """Every candidate once in each round, so that a busy machine hits all alike."""
    for candidate in candidates.values():
        for _ in range(warm_up):
            one_step(candidate)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for turn in range(rounds):
        names = list(candidates)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(one_step(candidates[name]))
    return {
        name: Measured(
            statistics.median(forward for forward, _ in taken),
            statistics.median(backward for _, backward in taken),
            saved_bytes(candidates[name]) / 2**20,
            peak_bytes(candidates[name]) / 2**20,
        )
        for name, taken in times.items()
    }


def one_step(candidate: Candidate) -> tuple[float, float]:
    """Milliseconds of one forward and one backward pass."""
    on_gpu = candidate.leaves[0].is_cuda
    marks = [Mark(on_gpu)]
    outputs = candidate.forward()
    marks.append(Mark(on_gpu))
    torch.autograd.grad(
        list(outputs), list(candidate.leaves), list(candidate.cotangents), allow_unused=True
    )
    marks.append(Mark(on_gpu))
    start, middle, end = marks
    return start.until(middle), middle.until(end)


class Mark:
    """A moment on the device's own clock."""

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if self._event is not None:
            self._event.record()
        self._time = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def until(self, later: Mark) -> float:
        """Milliseconds from this moment to a later one."""
        if self._event is None or later._event is None:
            return (later._time - self._time) * 1e3
        later._event.synchronize()
        return self._event.elapsed_time(later._event)


def saved_bytes(candidate: Candidate) -> int:
    """Bytes of storage that autograd keeps between forward and backward, leaves left out."""
    known = {leaf.untyped_storage().data_ptr() for leaf in candidate.leaves}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = candidate.forward()
    del outputs
    return sum(found.values())


def peak_bytes(candidate: Candidate) -> int:
    """Bytes that a step takes at its highest above what is there anyway."""
    if not candidate.leaves[0].is_cuda:
        return _peak_on_cpu(candidate)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one_step(candidate)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(candidate: Candidate) -> int:
    """From the profiler's record of every allocation, those of compiled graphs included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        one_step(candidate)
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def copy_bandwidth(num_bytes: int = 2**32) -> float:
    """Bytes per second of a large device-to-device copy, read and written ones counted."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    taken = []
    for _ in range(8):
        start = Mark(True)
        target.copy_(source)
        taken.append(start.until(Mark(True)))
    return 2 * num_bytes / (statistics.median(taken[2:]) * 1e-3)


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """A fixed number of threads for what torch runs on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
