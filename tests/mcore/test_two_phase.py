# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Block AttnRes in two phases through the host: equal to one phase, and really run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_residuals.functional import depth_weights
from megatron_residuals.mechanisms.sources import module as depth_attention
from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.residual_toy import spec_for
from megatron_residuals.testing.toy_gpt import (
    ToyGPT,
    ToyResult,
    build_chunks,
    merge,
    micro_batches,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import full_grads

LAYERS, BLOCK = 8, 5  # sublayers: blocks of 5, 5, 5 and 1
TOY = ToyGPT(num_layers=LAYERS, hidden_size=16, num_heads=2, seq_length=6, dtype=torch.float64)
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "pp2": dict(pp=2), "pp2-vpp2": dict(pp=2, vpp=2)}


class Run(NamedTuple):
    """A step, and how many readers shared each phase 1 of its first forward."""

    result: ToyResult
    passes: list[int]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Numbers of readers of every phase 1."""
    passes: list[int] = []
    stock = depth_attention.read_closed

    def read_closed(sources: Any, directions: Any, **options: Any) -> Any:
        passes.append(len(directions))
        return stock(sources, directions, **options)

    with mock.patch.object(depth_attention, "read_closed", read_closed):
        yield passes


def spec(two_phase: str, **options: Any) -> Callable[..., Any]:
    words = "".join(f", {name}={value!r}" for name, value in options.items())
    return spec_for(f"block_attnres(block_sublayers={BLOCK}, two_phase={two_phase!r}{words})")


def every_choice(toy: ToyGPT) -> dict[str, Run]:
    """On one rank: a second step for each choice."""
    setup_parallel(toy)
    found = {}
    for choice in ("off", "auto", "on"):
        chunks = build_chunks(toy, spec(choice))
        train_step(chunks, toy)
        with counted() as passes:
            losses = train_step(chunks, toy)
        found[choice] = Run(ToyResult(losses, full_grads(chunks)), passes)
    return found


@functools.cache
def ranks(layout: str) -> list[dict[str, Run]]:
    toy = ToyGPT(**{**vars(TOY), "num_microbatches": 2, **LAYOUTS[layout]})
    return run_ranks(toy.world_size, every_choice, toy, timeout_s=100)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choice", ["auto", "on"])
def test_losses_and_gradients_are_those_of_one_phase(layout: str, choice: str) -> None:
    actual = merge([rank[choice].result for rank in ranks(layout)])
    expected = merge([rank["off"].result for rank in ranks(layout)])
    for mine, theirs in zip(actual.losses, expected.losses, strict=True):
        assert abs(mine - theirs) <= 1e-12 * abs(theirs)
    for name, gradient in expected.grads.items():
        found = actual.grads[name]
        assert_close(found, gradient, dtype=torch.float64, kind="same_math", name=name)


def test_the_finished_sources_are_read_once_for_each_part_of_a_block_in_a_stage() -> None:
    (alone,) = ranks("one")
    assert alone["off"].passes == []
    assert alone["auto"].passes == [5, 5, 5] * 2  # two micro-batches; the last block has one reader
    assert alone["on"].passes == [5, 5, 5] * 2
    # of two stages, eight sublayers each, the first ends inside the second block
    first, second = ranks("pp2")
    assert first["auto"].passes == [5, 3] * 2
    assert second["auto"].passes == [2, 5] * 2


def test_evaluation_reads_in_two_phases_and_states_still_say_what_is_read() -> None:
    def weights(choice: str) -> tuple[float, dict[int, list[float]]]:
        means: dict[int, list[float]] = {}

        def watch(module: Any, reader: int) -> None:
            stock = module.read

            def read(state: Any) -> Any:
                gains = (module.query, module.key_gain)
                found = depth_weights(state.readable, *gains, eps=module.eps)
                means[reader] = found.flatten(1).mean(1).tolist()
                return stock(state)

            module.read = read

        setup_parallel(TOY)
        (chunk,) = build_chunks(TOY, spec(choice))
        chunk.eval()
        for layer in chunk.decoder.layers:
            first = 2 * (layer.layer_number - 1)
            watch(layer.self_attention_residual, first)
            watch(layer.mlp_residual, first + 1)
        batch = next(micro_batches(TOY))
        with counted() as passes, torch.no_grad():
            loss = chunk(batch["tokens"], batch["positions"], batch["mask"]).square().sum()
        assert passes == ([] if choice == "off" else [5, 5, 5])
        return loss.item(), means

    ((loss, means),) = run_ranks(1, weights, "off")
    ((other, found),) = run_ranks(1, weights, "auto")
    assert abs(loss - other) <= 1e-12 * abs(loss)
    assert found.keys() == means.keys() == set(range(2 * LAYERS))
    for reader, expected in means.items():
        assert found[reader] == pytest.approx(expected, rel=1e-10)


def test_two_phases_demanded_of_full_attnres_are_refused_when_the_model_is_built() -> None:
    def build() -> str:
        setup_parallel(TOY)
        with pytest.raises(ValueError) as error:
            build_chunks(TOY, spec_for("attnres(two_phase='on')"))
        return str(error.value)

    (message,) = run_ranks(1, build)
    assert "leave two_phase out" in message
