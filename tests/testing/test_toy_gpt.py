# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The stock model in every parallel layout against one process: the ground for other tests."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_residuals.testing import assert_close, run_ranks
from megatron_residuals.testing.tolerances import Kind
from megatron_residuals.testing.toy_gpt import (
    Spec,
    ToyGPT,
    ToyResult,
    TransformerConfig,
    build_chunks,
    merge,
    run_toy,
    setup_parallel,
    train_step,
)
from megatron_residuals.testing.toy_weights import default_initialise, full_grads, named_globally

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

FP32 = ToyGPT()
FP64 = ToyGPT(dtype=torch.float64)
VARIED = ToyGPT(
    dtype=torch.float64,
    tied_embeddings=True,
    positions="learned_absolute",
    normalization="RMSNorm",
    bias=False,
    seq_lengths=(16, 8, 12, 16),
    config_overrides={
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_query_groups": 2,
        "qk_layernorm": True,
    },
)


@functools.cache
def _one_process(toy: ToyGPT) -> ToyResult:
    return run_toy(toy)


def _assert_same(actual: ToyResult, expected: ToyResult, dtype: torch.dtype, kind: Kind) -> None:
    assert actual.grads.keys() == expected.grads.keys()
    losses = [torch.tensor(result.losses, dtype=torch.float64) for result in (actual, expected)]
    assert_close(*losses, dtype=dtype, kind=kind, name="losses")
    for name, grad in expected.grads.items():
        assert grad.dtype == dtype
        assert_close(actual.grads[name], grad, dtype=dtype, kind=kind, name=name)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 4}], ids=str)
def test_a_pipeline_computes_bit_for_bit_what_one_process_does(layout: dict[str, int]) -> None:
    actual = run_toy(dataclasses.replace(FP32, **layout))
    assert len(actual.losses) == FP32.num_microbatches
    _assert_same(actual, _one_process(FP32), torch.float32, "exact")


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "pp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("base", [FP32, FP64], ids=["fp32", "fp64"])
def test_tensor_parallelism_changes_no_more_than_the_order_of_sums(
    base: ToyGPT, layout: dict[str, int]
) -> None:
    actual = run_toy(dataclasses.replace(base, **layout))
    _assert_same(actual, _one_process(base), base.dtype, "same_math")


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2, "vpp": 2}, {"tp": 2, "sequence_parallel": True, "pp": 2}],
    ids=str,
)
def test_tied_gated_grouped_models_with_varying_lengths_agree_too(layout: dict[str, int]) -> None:
    actual = run_toy(dataclasses.replace(VARIED, **layout))
    _assert_same(actual, _one_process(VARIED), VARIED.dtype, "same_math")


def test_overrides_win_and_uneven_stages_agree() -> None:
    uneven = dataclasses.replace(
        FP32,
        pp=2,
        config_overrides={
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 1,
        },
    )
    _assert_same(run_toy(uneven), _one_process(FP32), torch.float32, "exact")


def _slope(toy: ToyGPT) -> tuple[float, float]:
    """Mean loss along a random direction: by gradients, and by central differences."""
    setup_parallel(toy)
    chunks = build_chunks(toy)
    train_step(chunks, toy)
    generator = torch.Generator().manual_seed(5)
    weights = [parameter for _, parameter in named_globally(chunks[0])]
    direction = [torch.randn(w.shape, generator=generator, dtype=toy.dtype) for w in weights]
    by_gradient = sum((w.grad * d).sum() for w, d in zip(weights, direction, strict=True)).item()
    step, means = 1e-6, []
    for sign in (1, -2):
        with torch.no_grad():
            for w, d in zip(weights, direction, strict=True):
                w += sign * step * d
        losses = train_step(chunks, toy, forward_only=True)
        means.append(sum(losses) / len(losses))
    return by_gradient, (means[0] - means[1]) / (2 * step)


def test_a_float64_toy_computes_in_float64_throughout() -> None:
    # One cast to float32 on the way to the loss leaves noise of 0.1 in the difference quotient.
    ((by_gradient, by_differences),) = run_ranks(1, _slope, FP64)
    assert by_differences == pytest.approx(by_gradient, rel=1e-7)


def _kept(toy: ToyGPT) -> list[str]:
    setup_parallel(toy)

    def fill_biases_only(
        name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> torch.Tensor | None:
        return torch.full(shape, 3.0) if name.endswith("linear_fc2.bias") else None

    chunks = build_chunks(toy, initialise=fill_biases_only)
    return [
        name
        for chunk in chunks
        for name, parameter in named_globally(chunk)
        if bool((parameter == 3.0).all())
    ]


def test_initialise_sees_global_names_and_leaves_alone_what_it_declines() -> None:
    ranks = run_ranks(2, _kept, ToyGPT(pp=2, vpp=2))
    layers = [[f"decoder.layers.{i}.mlp.linear_fc2.bias" for i in own] for own in ((0, 2), (1, 3))]
    assert ranks == layers


def _spec_by_stage(config: TransformerConfig, vp_stage: int | None) -> Spec:
    assert vp_stage in (0, 1) and config.num_layers == 4
    return get_gpt_layer_local_spec()


def test_a_spec_may_be_made_from_config_and_virtual_stage() -> None:
    toy = ToyGPT(pp=2, vpp=2)
    _assert_same(run_toy(toy, _spec_by_stage), _one_process(FP32), torch.float32, "exact")


def _forward_only_leaves(toy: ToyGPT) -> tuple[list[float], list[float], bool]:
    setup_parallel(toy)
    chunks = build_chunks(toy)
    evaluated = train_step(chunks, toy, forward_only=True)
    untouched = all(parameter.grad is None for parameter in chunks[0].parameters())
    return evaluated, train_step(chunks, toy), untouched


def test_a_forward_only_step_has_the_losses_of_a_training_step_and_no_gradients() -> None:
    first, last = run_ranks(2, _forward_only_leaves, ToyGPT(pp=2))
    assert first == ([], [], True)
    evaluated, trained, untouched = last
    assert evaluated == trained == _one_process(FP32).losses and untouched


def _twice(toy: ToyGPT) -> bool:
    setup_parallel(toy)
    chunks = build_chunks(toy)
    train_step(chunks, toy)
    first = full_grads(chunks)
    train_step(chunks, toy)
    second = full_grads(chunks)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_gradients_are_replaced_by_the_next_step_and_gathering_does_not_change_them() -> None:
    assert run_ranks(2, _twice, ToyGPT(tp=2, sequence_parallel=True)) == [True, True]


def test_recomputation_replays_dropout() -> None:
    toy = ToyGPT(dropout=0.2)
    recomputed = dataclasses.replace(
        toy,
        config_overrides={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    )
    plain = _one_process(toy)
    assert plain.losses != _one_process(FP32).losses
    _assert_same(run_toy(recomputed), plain, torch.float32, "exact")


def test_ranks_that_disagree_on_a_shared_gradient_are_named() -> None:
    name = "decoder.layers.0.input_layernorm.weight"
    results = [ToyResult([1.0], {name: torch.tensor([value])}) for value in (1.0, 1.25)]
    with pytest.raises(RuntimeError, match=f"gradient of {name}: rank 1 differs by 2.500e-01"):
        merge(results)


def test_default_weights_depend_on_the_name_and_the_seed_alone() -> None:
    name, shape = "decoder.layers.1.mlp.linear_fc1.weight", (3, 2)
    first, second = (
        default_initialise(name, shape, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, second)
    norm = default_initialise("final_layernorm.weight", shape, torch.Generator().manual_seed(3))
    assert torch.equal(norm, first + 1)
