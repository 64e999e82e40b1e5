# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters: how many, that all of them learn, and that they can be made later or anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms.sources import Sources
from megatron_residuals.modules import build_head, build_sublayer_residual
from tests.functional.loops import random_tensors
from tests.modules.tiny_model import MECHANISMS, NUM_LAYERS, TinyModel, tokens

META = torch.device("meta")

every_mechanism = pytest.mark.parametrize("config", MECHANISMS, ids=str)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def sublayer_and_head(
    config: ResidualConfig, hidden_size: int, sublayer: int = 1, device: torch.device | None = None
) -> tuple[nn.Module, nn.Module]:
    depth = config.depth_map(NUM_LAYERS)
    residual = build_sublayer_residual(
        config, depth, hidden_size=hidden_size, sublayer=sublayer, device=device
    )
    return residual, build_head(config, hidden_size=hidden_size, device=device)


def test_hc_adds_what_its_paper_counts() -> None:
    """n (n + 2) + d (n + 2) + 2; two per layer of OLMo-1B: 394,048."""
    residual, head = sublayer_and_head(ResidualConfig("hc"), 2048, device=META)
    assert 2 * 16 * count(residual) == 394_048
    assert count(head) == 0
    static, _ = sublayer_and_head(ResidualConfig("hc", hc_dynamic=False), 2048, device=META)
    assert count(static) == 4 * 6


def test_mhc_adds_what_its_equations_say() -> None:
    """n d (n^2 + 2n) + n^2 + 2n + 3 per sublayer, n d n + n + 1 for the head of DeepSeek-V4."""
    residual, head = sublayer_and_head(ResidualConfig("mhc"), 7168, device=META)
    assert count(residual) == 688_155
    assert count(head) == 0
    _, learned = sublayer_and_head(ResidualConfig("mhc", mhc_convention="dsv4"), 7168, device=META)
    assert count(learned) == 4 * 4 * 7168 + 4 + 1


@pytest.mark.parametrize("mechanism", ["attnres", "block_attnres"])
def test_attnres_adds_a_query_and_a_gain_per_reader(mechanism: str) -> None:
    """(4 layers + 2) d in the whole model: 2.68 million for the 93 layers of Kimi-K3."""
    residual, head = sublayer_and_head(ResidualConfig(mechanism), 7168, device=META)
    assert count(residual) == count(head) == 2 * 7168
    assert 2 * 93 * count(residual) + count(head) == (4 * 93 + 2) * 7168 == 2_680_832


def test_the_plain_residual_adds_nothing() -> None:
    assert [count(module) for module in sublayer_and_head(ResidualConfig("residual"), 8)] == [0, 0]


@every_mechanism
@pytest.mark.parametrize("random_residual", [0.0, 0.5])
def test_one_backward_gives_every_parameter_a_gradient(
    random_residual: float, config: ResidualConfig
) -> None:
    """Also those that cannot matter, as the query of the first sublayer: data-parallel wrappers
    wait for every parameter."""
    model = TinyModel(config, random_residual=random_residual)
    logits = model(tokens())
    (logits * random_tensors(1)(*logits.shape)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    if isinstance(config.entry, Sources):
        first = model.residuals[0]
        assert torch.equal(first.query.grad, torch.zeros_like(first.query))


@every_mechanism
def test_away_from_the_start_every_parameter_that_can_matter_does(config: ResidualConfig) -> None:
    model = TinyModel(config, random_residual=0.5)
    logits = model(tokens())
    (logits * random_tensors(1)(*logits.shape)).sum().backward()
    for name, parameter in model.mechanism_parameters():
        # The first sublayer finds one source, or streams that are all equal.
        first = name.startswith("0.")
        # One stream: mixed by the number one, and its read weight is undone by the next norm.
        alone = getattr(config, "streams", 0) == 1 and ("alpha_pre" in name or "alpha_res" in name)
        if not first and not alone:
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-9, name


@every_mechanism
def test_zero_embeddings_give_finite_gradients_in_float32(config: ResidualConfig) -> None:
    """Padding tokens may be embedded as zero; the norms then divide by the root of eps alone."""
    model = TinyModel(config).float()
    with torch.no_grad():
        model.shared.embedding[tokens()[0, 0]] = 0.0
    state = model.open(tokens())
    x, pending = model.residuals[0].read(state)
    written = model.residuals[0].write(pending, x.cos())
    hidden = model.head(written)
    cotangent = random_tensors(2)(*hidden.shape).float()
    wanted = [model.shared.embedding, *model.residuals[0].parameters(), *model.head.parameters()]
    for gradient in torch.autograd.grad(hidden, wanted, cotangent, allow_unused=True):
        assert gradient is not None and gradient.isfinite().all()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New memory is full of NaN, not of the zeros that it often happens to hold."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def host_to_empty(module: nn.Module) -> nn.Module:
    """What `to_empty_if_meta_device` of Megatron's training loop does."""
    return module._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)


GIVE_MEMORY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "to_empty_if_meta_device": host_to_empty,
    "to_empty of 16 bit": lambda module: module.bfloat16().to_empty(device="cpu"),
}


@every_mechanism
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("how", GIVE_MEMORY)
@pytest.mark.parametrize("ambient", [False, True])
def test_memory_after_a_start_on_meta_comes_with_the_initial_values(
    ambient: bool, how: str, config: ResidualConfig
) -> None:
    """Large models are born without memory. Only those who called `reset_parameters` themselves got
    initial values, and Megatron's training loop does not: it trained what lay in the memory. The
    tags went too, among them the one that has the host sum gradients over sequence shards."""
    expected = sublayer_and_head(config, 6)
    with torch.device("meta" if ambient else "cpu"):
        born = sublayer_and_head(config, 6, device=None if ambient else META)
    for module, late in zip(expected, born, strict=True):
        for parameter in late.parameters():
            assert parameter.is_meta
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        GIVE_MEMORY[how](nn.Sequential(late))
        assert late.state_dict().keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            assert torch.equal(late.state_dict()[name], value), name
        assert all(parameter.sequence_parallel for parameter in late.parameters())  # type: ignore[attr-defined]


@every_mechanism
def test_reset_parameters_restores_the_initial_values(config: ResidualConfig) -> None:
    for module, late in zip(*(sublayer_and_head(config, 6) for _ in range(2)), strict=True):
        with torch.no_grad():
            for parameter in late.parameters():
                parameter.fill_(float("nan"))
        late.reset_parameters()  # type: ignore[operator]
        for name, value in module.state_dict().items():
            assert torch.equal(late.state_dict()[name], value), name


@every_mechanism
@pytest.mark.parametrize("ambient", [torch.bfloat16, torch.float64])
def test_parameters_are_never_narrower_than_float32(
    ambient: torch.dtype, config: ResidualConfig
) -> None:
    """Under a default dtype of 16 bit they were born in 16 bit, and nothing widened them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(ambient)
    try:
        modules = sublayer_and_head(config, 6)
    finally:
        torch.set_default_dtype(before)
    dtypes = {parameter.dtype for module in modules for parameter in module.parameters()}
    assert dtypes <= {torch.float32 if ambient == torch.bfloat16 else torch.float64}


@every_mechanism
def test_parameters_do_not_depend_on_the_random_number_generator(config: ResidualConfig) -> None:
    """So that ranks agree without a broadcast, and a plain model of one seed stays comparable."""
    before = torch.get_rng_state()
    first = sublayer_and_head(config, 6)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    for one, other in zip(first, sublayer_and_head(config, 6), strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
