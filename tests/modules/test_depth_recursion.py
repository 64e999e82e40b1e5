# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Full and Block AttnRes with random queries against the recursions of the paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.mechanisms.sources.module import DepthQuery
from megatron_residuals.modules import SourceState
from megatron_residuals.testing import assert_close
from tests.modules.tiny_model import (
    NUM_LAYERS,
    NUM_SUBLAYERS,
    Outcome,
    TinyModel,
    outcome,
    tokens,
)

Recursion = Callable[[TinyModel, int], Tensor]


def block_model(block_sublayers: int) -> TinyModel:
    config = ResidualConfig("block_attnres", block_sublayers=block_sublayers)
    return TinyModel(config, random_residual=0.7)


def attend(reader: torch.nn.Module, sources: list[Tensor]) -> Tensor:
    """All sources stacked; key = RMSNorm(value) * gain; softmax over the stack."""
    assert isinstance(reader, DepthQuery)
    values = torch.stack(sources)
    keys = values / (values.square().mean(-1, keepdim=True) + reader.eps).sqrt() * reader.key_gain
    weights = torch.softmax((keys * reader.query).sum(-1), dim=0)
    return (weights.unsqueeze(-1) * values).sum(0)


def full_recursion(model: TinyModel, block_sublayers: int) -> Tensor:
    """v_0 = embedding, v_i = f_i(h_i), h_l = sum over all v_i with i < l."""
    assert block_sublayers == 1
    values = [model.shared.embedding[tokens()]]
    for reader, sublayer in zip(model.residuals, model.shared.sublayers, strict=True):
        values.append(sublayer(attend(reader, values)))
    return model.shared.logits(attend(model.head, values))


def block_recursion(model: TinyModel, block_sublayers: int) -> Tensor:
    """b_n = sum of the outputs of block n; the i-th sublayer of a block reads b_0 ... b_(n-1) and,
    from the second on, the sum of the outputs of its own block so far."""
    blocks = [model.shared.embedding[tokens()]]
    for start in range(0, NUM_SUBLAYERS, block_sublayers):
        outputs: list[Tensor] = []
        for i in range(start, min(start + block_sublayers, NUM_SUBLAYERS)):
            own = [torch.stack(outputs).sum(0)] if outputs else []
            outputs.append(model.shared.sublayers[i](attend(model.residuals[i], blocks + own)))
        blocks.append(torch.stack(outputs).sum(0))
    return model.shared.logits(attend(model.head, blocks))


def layer_recursion(model: TinyModel, block_sublayers: int) -> Tensor:
    """The released form, by layers: aggregate, then push the finished sum, then start afresh."""
    assert block_sublayers % 2 == 0
    blocks, partial = [], model.shared.embedding[tokens()]
    for layer in range(NUM_LAYERS):
        attention, mlp = model.shared.sublayers[2 * layer : 2 * layer + 2]
        x = partial if layer == 0 else attend(model.residuals[2 * layer], [*blocks, partial])
        opens = layer % (block_sublayers // 2) == 0
        if opens:
            blocks.append(partial)
        output = attention(x)
        partial = output if opens else partial + output
        x = attend(model.residuals[2 * layer + 1], [*blocks, partial])
        partial = partial + mlp(x)
    return model.shared.logits(attend(model.head, [*blocks, partial]))


def assert_agree(actual: Outcome, expected: Outcome) -> None:
    assert_close(actual.logits, expected.logits, dtype=torch.float64, kind="same_math")
    for name, gradient in expected.gradients.items():
        assert_close(
            actual.gradients[name], gradient, dtype=torch.float64, kind="same_math", name=name
        )


CASES: list[tuple[Recursion, int]] = [
    (full_recursion, 1),
    *((block_recursion, length) for length in range(1, NUM_SUBLAYERS + 2)),
    *((layer_recursion, length) for length in (2, 4, 6)),
]


@pytest.mark.parametrize(
    ("recursion", "block_sublayers"), CASES, ids=lambda case: getattr(case, "__name__", case)
)
def test_blocks_follow_the_published_recursion_with_random_queries(
    recursion: Recursion, block_sublayers: int
) -> None:
    """Block lengths that do not divide the depth included; every gradient compared."""
    model = block_model(block_sublayers)
    # The first sublayer has one source, so a recursion may leave its query out altogether.
    read = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name not in ("residuals.0.query", "residuals.0.key_gain")
    ]
    actual = outcome(model(tokens()), iter(read))
    expected = outcome(recursion(model, block_sublayers), iter(read))
    assert_agree(actual, expected)


def test_random_queries_matter() -> None:
    """Without this the recursion tests could pass on weights that are all equal."""
    logits = {length: block_model(length)(tokens()) for length in range(1, NUM_SUBLAYERS + 1)}
    for length in range(2, NUM_SUBLAYERS + 1):
        assert (logits[length] - logits[length - 1]).abs().max() > 1e-3


def test_blocks_of_one_sublayer_are_full_attnres_bit_for_bit() -> None:
    full = TinyModel(ResidualConfig("attnres"), random_residual=0.7)
    block = block_model(1)
    assert full.state_dict().keys() == block.state_dict().keys()
    expected = outcome(full(tokens()), full.named_parameters())
    actual = outcome(block(tokens()), block.named_parameters())
    assert torch.equal(actual.logits, expected.logits)
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.parametrize("layers", range(1, NUM_LAYERS + 1))
def test_a_block_length_in_layers_is_twice_that_in_sublayers_bit_for_bit(layers: int) -> None:
    config = ResidualConfig("block_attnres", block_layers=layers)
    by_layers = TinyModel(config, random_residual=0.7)
    by_sublayers = block_model(2 * layers)
    expected = outcome(by_sublayers(tokens()), by_sublayers.named_parameters())
    actual = outcome(by_layers(tokens()), by_layers.named_parameters())
    assert torch.equal(actual.logits, expected.logits)
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.parametrize("block_sublayers", range(1, NUM_SUBLAYERS + 2))
def test_no_source_is_lost_or_doubled_at_any_sublayer(block_sublayers: int) -> None:
    """sum of sources + running sum == embedding + sum of all sublayer outputs, whatever is read."""
    model = block_model(block_sublayers)
    total = model.shared.embedding[tokens()]
    state = model.open(tokens())
    depth = model.config.depth_map(NUM_LAYERS)
    assert depth is not None
    for i in range(NUM_SUBLAYERS + 1):
        assert isinstance(state, SourceState)
        assert len(state.sources) == depth.num_sources(i)
        held = torch.stack([*state.sources, state.partial]).sum(0)
        assert_close(held, total, dtype=torch.float64, kind="same_math", name=f"sublayer {i}")
        if i < NUM_SUBLAYERS:
            x, pending = model.residuals[i].read(state)
            output = model.shared.sublayers[i](x)
            total = total + output
            state = model.residuals[i].write(pending, output)


@pytest.mark.parametrize("block_sublayers", [1, 3, 4])
def test_a_huge_query_selects_each_source_of_each_sublayer_in_turn(block_sublayers: int) -> None:
    """One token; source k of the state is source k of the depth map, summed from its outputs."""
    model = block_model(block_sublayers)
    depth = model.config.depth_map(NUM_LAYERS)
    assert depth is not None
    outputs: list[Tensor] = []
    state = model.open(tokens())
    for i in range(NUM_SUBLAYERS + 1):
        reader = model.residuals[i] if i < NUM_SUBLAYERS else model.head
        for source in range(depth.num_read(i)):
            own = [outputs[j] for j in depth.block_range(source) if j < i]
            expected = torch.stack(own).sum(0) if own else model.shared.embedding[tokens()]
            selected = select(reader, state, expected[2, 1])
            assert_close(selected[2, 1], expected[2, 1], dtype=torch.float64, kind="reordered")
        if i < NUM_SUBLAYERS:
            x, pending = model.residuals[i].read(state)
            outputs.append(model.shared.sublayers[i](x))
            state = model.residuals[i].write(pending, outputs[-1])


def select(reader: torch.nn.Module, state: object, direction: Tensor) -> Tensor:
    """What a reader gets with a huge query in that direction; its own query is put back."""
    assert isinstance(reader, DepthQuery) and isinstance(state, SourceState)
    kept = {name: tensor.clone() for name, tensor in reader.state_dict().items()}
    with torch.no_grad():
        reader.query.copy_(1e7 * direction / direction.norm())
        reader.key_gain.fill_(1.0)
        selected = reader.attend(state, reader.query, reader.key_gain)
    reader.load_state_dict(kept)
    return selected
