# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters stay float32 in a 16-bit model, and coefficients are computed in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_residuals.config import ResidualConfig
from megatron_residuals.functional import depth_weights
from megatron_residuals.mechanisms.sources.module import DepthQuery
from megatron_residuals.mechanisms.streams import Streams
from megatron_residuals.mechanisms.streams.module import StreamResidual
from megatron_residuals.modules import (
    ResidualState,
    SourceState,
    StreamState,
    build_head,
    build_sublayer_residual,
)
from tests.functional.loops import random_tensors
from tests.modules.tiny_model import MECHANISMS, NUM_LAYERS

D = 16
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    ".bfloat16()": lambda module: module.bfloat16(),
    ".half()": lambda module: module.half(),
    ".to(bfloat16)": lambda module: module.to(torch.bfloat16),
    ".to(device, dtype)": lambda module: module.to("cpu", torch.float16),
    ".type(bfloat16)": lambda module: module.type(torch.bfloat16),
}
WITH_PARAMETERS = [config for config in MECHANISMS if config.mechanism != "residual"]

every_mechanism = pytest.mark.parametrize("config", WITH_PARAMETERS, ids=str)


class Layer(nn.Module):
    """An ordinary linear map beside a residual, one level below the module that is cast."""

    def __init__(self, config: ResidualConfig) -> None:
        super().__init__()
        depth = config.depth_map(NUM_LAYERS)
        self.linear = nn.Linear(D, D)
        self.residual = build_sublayer_residual(config, depth, hidden_size=D, sublayer=3)
        self.head = build_head(config, hidden_size=D)
        draw = random_tensors(1)
        with torch.no_grad():
            for module in (self.residual, self.head):
                for parameter in module.parameters():
                    parameter += 0.3 * draw(*parameter.shape)


def model_of(config: ResidualConfig) -> nn.Sequential:
    return nn.Sequential(Layer(config))


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "linear" not in name}


@every_mechanism
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_of_the_model_leaves_the_mechanism_as_it_was_bit_for_bit(
    cast: str, config: ResidualConfig
) -> None:
    """Values too: a detour through 16 bit would have rounded them."""
    model = model_of(config)
    before = {name: p.detach().clone() for name, p in own_parameters(model).items()}
    identities = {name: id(p) for name, p in own_parameters(model).items()}
    CASTS[cast](model)
    assert model[0].linear.weight.dtype in SIXTEEN_BIT
    after = own_parameters(model)
    assert after.keys() == before.keys()
    for name, parameter in after.items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name]), name
        # An optimizer made before the cast still holds these.
        assert id(parameter) == identities[name]
        assert model.state_dict()[name].dtype == torch.float32


@every_mechanism
def test_gradients_stay_float32_through_a_cast(config: ResidualConfig) -> None:
    model = model_of(config)
    for parameter in own_parameters(model).values():
        parameter.grad = parameter.detach() / 3
    model.bfloat16()
    for parameter in own_parameters(model).values():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, parameter.detach() / 3)


@every_mechanism
def test_widening_and_moving_still_work(config: ResidualConfig) -> None:
    model = model_of(config)
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}
    model.to("meta", torch.bfloat16)
    assert all(p.is_meta for p in model.parameters())
    assert {p.dtype for p in own_parameters(model).values()} == {torch.float32}
    assert model[0].linear.weight.dtype == torch.bfloat16


@every_mechanism
def test_a_checkpoint_in_16_bit_loads_into_float32(config: ResidualConfig) -> None:
    model = model_of(config).bfloat16()
    narrow = {name: value.bfloat16() for name, value in model.state_dict().items()}
    model.load_state_dict(narrow)
    for name, parameter in own_parameters(model).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, narrow[name].float())


def state_of(config: ResidualConfig, dtype: torch.dtype) -> ResidualState:
    draw = random_tensors(2)
    if isinstance(config.entry, Streams):
        streams = draw(6, 2, config.streams, D).to(dtype)
        reads = draw(6, 2, config.streams).float() if config.entry.numbers(config) else None
        return StreamState(streams, reads=reads)
    return SourceState(tuple(draw(6, 2, D).to(dtype) for _ in range(3)), draw(6, 2, D).to(dtype))


def as_float64(state: ResidualState) -> ResidualState:
    if isinstance(state, StreamState):
        reads = None if state.reads is None else state.reads.double()
        return StreamState(state.streams.double(), reads=reads)
    assert isinstance(state, SourceState)
    return SourceState(tuple(s.double() for s in state.sources), state.partial.double())


def coefficients(module: nn.Module, state: ResidualState) -> tuple[Tensor, ...]:
    """What a sublayer computes from the state before it touches an activation."""
    if isinstance(module, StreamResidual):
        assert isinstance(state, StreamState)
        return tuple(each for each in module.coefficients(state.streams) if each is not None)
    assert isinstance(module, DepthQuery) and isinstance(state, SourceState)
    sources = (*state.sources, state.partial)
    return (depth_weights(sources, module.query, module.key_gain, eps=module.eps),)


def assert_float32_accuracy(actual: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """A thousand times better than bfloat16, whose eps is 8e-3, could do."""
    for mine, theirs in zip(actual, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).abs().max() <= 5e-6


@every_mechanism
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_coefficients_of_16_bit_activations_are_float32(
    dtype: torch.dtype, config: ResidualConfig
) -> None:
    residual = model_of(config).to(dtype)[0].residual
    exact = copy.deepcopy(residual).double()
    state = state_of(config, dtype)
    assert_float32_accuracy(coefficients(residual, state), coefficients(exact, as_float64(state)))


@every_mechanism
def test_autocast_around_the_model_leaves_the_coefficients_float32(config: ResidualConfig) -> None:
    residual = model_of(config).bfloat16()[0].residual
    exact = copy.deepcopy(residual).double()
    state = state_of(config, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        actual = coefficients(residual, state)
    assert_float32_accuracy(actual, coefficients(exact, as_float64(state)))


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """Within half a unit of the last place of the exact result, and float32's noise."""
    assert actual.dtype in SIXTEEN_BIT
    half_unit = torch.finfo(actual.dtype).eps / 2
    assert ((actual.double() - exact).abs() <= half_unit * exact.abs() + 1e-5).all()


@every_mechanism
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_activations_keep_their_dtype_and_are_rounded_once(
    dtype: torch.dtype, config: ResidualConfig
) -> None:
    layer = model_of(config).to(dtype)[0]
    exact = copy.deepcopy(layer).double()
    state, output = state_of(config, dtype), random_tensors(3)(6, 2, D).to(dtype)
    (x, pending), (x64, pending64) = (
        layer.residual.read(state),
        exact.residual.read(as_float64(state)),
    )
    assert_rounded_once(x, x64)
    written = layer.residual.write(pending, output)
    written64 = exact.residual.write(pending64, output.double())
    if isinstance(config.entry, Streams):
        assert_rounded_once(written.settled().streams, written64.settled().streams)
    else:
        assert_rounded_once(written.partial, written64.partial)
    assert_rounded_once(layer.head(state), exact.head(as_float64(state)))


@every_mechanism
def test_gradients_of_float32_parameters_are_float32_accurate(config: ResidualConfig) -> None:
    layer = model_of(config).bfloat16()[0]
    exact = copy.deepcopy(layer).double()
    state = state_of(config, torch.bfloat16)
    cotangent = random_tensors(4)(6, 2, D).bfloat16()
    for module, reference in ((layer.residual, exact.residual), (layer.head, exact.head)):
        own, wide = list(module.parameters()), list(reference.parameters())
        if not own:
            continue
        verb = "read" if module is layer.residual else "close"
        x = first(getattr(module, verb)(state))
        x64 = first(getattr(reference, verb)(as_float64(state)))
        grads = torch.autograd.grad(x, own, cotangent, allow_unused=True)
        exact_grads = torch.autograd.grad(x64, wide, cotangent.double(), allow_unused=True)
        for grad, exact_grad in zip(grads, exact_grads, strict=True):
            assert (grad is None) == (exact_grad is None)
            if grad is not None and exact_grad is not None:
                assert grad.dtype == torch.float32
                assert (grad - exact_grad).abs().max() <= 1e-5 * (1 + exact_grad.abs().max())


def first(result: object) -> Tensor:
    """The tensor that a read or a close returns."""
    tensor = result[0] if isinstance(result, tuple) else result
    assert isinstance(tensor, Tensor)
    return tensor
