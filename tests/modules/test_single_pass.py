# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Single-Pass mHC: reads with the weights of the sublayer before, which travel with the streams."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.modules import StreamState
from megatron_residuals.testing import assert_close
from tests.functional import loops
from tests.modules.tiny_model import NUM_SUBLAYERS, TinyModel, outcome, tokens

N, EPS = 3, 1e-3
close = functools.partial(assert_close, dtype=torch.float64, kind="same_math")


def settled(state: object) -> StreamState:
    assert isinstance(state, StreamState)
    return state.settled()


@pytest.mark.parametrize("convention", ["paper", "dsv4"])
def test_every_sublayer_follows_the_equations_token_by_token(convention: str) -> None:
    """X' = B_l X + C_l F(A_{l-1} X), where A, B, C are of X; the first sublayer reads stream 0."""
    config = ResidualConfig(
        "single_pass_mhc",
        streams=N,
        mhc_convention=convention,
        mhc_eps=EPS,
        mhc_sinkhorn_iterations=3,
    )
    model = TinyModel(config, random_residual=0.3)
    reads = [1.0, 0.0, 0.0]
    states = [settled(state) for state in model.states(tokens())]
    s, b = 2, 1
    for i in range(NUM_SUBLAYERS):
        module, streams = model.residuals[i], states[i].streams[s, b].tolist()
        pre, post, res = loops.mhc_coefficients(
            streams,
            module.mapping_weight.tolist(),
            module.bias.tolist(),
            torch.cat(module.alphas).tolist(),
            convention=convention,
            iterations=3,
            eps=EPS,
        )
        x, _ = module.read(states[i])
        close(x[s, b], combined(reads, streams))
        output = model.shared.sublayers[i](x)[s, b]
        mixed = torch.stack([combined(row, streams) for row in res])
        written = torch.tensor(post, dtype=torch.float64).unsqueeze(-1) * output
        close(states[i + 1].streams[s, b], mixed + written)
        reads = pre
    close(model.head(states[-1])[s, b], combined(reads, states[-1].streams[s, b].tolist()))


def combined(weights: list[float], streams: list[list[float]]) -> Tensor:
    dtype = torch.float64
    return torch.tensor(weights, dtype=dtype) @ torch.tensor(streams, dtype=dtype)


def test_with_predictions_that_do_not_depend_on_the_streams_it_is_mhc() -> None:
    """mHC whose part pre is that of the sublayer before, and whose head is the last one's."""
    shifted = TinyModel(ResidualConfig("single_pass_mhc", streams=N), random_residual=0.3)
    plain = TinyModel(ResidualConfig("mhc", streams=N, contraction="learned"))
    following = torch.tensor([40.0, -40.0, -40.0], dtype=torch.float64)  # sigmoids of one and zero
    with torch.no_grad():
        for theirs, mine in zip(shifted.residuals, plain.residuals, strict=True):
            theirs.mapping_weight.zero_()
            mine.load_state_dict(theirs.state_dict())
            mine.bias[:N] = following
            following = theirs.bias[:N].clone()
        plain.head.head_bias.copy_(following)
    shared = [
        outcome(model(tokens()), model.shared.named_parameters()) for model in (shifted, plain)
    ]
    close(shared[0].logits, shared[1].logits)
    for name, gradient in shared[1].gradients.items():
        close(shared[0].gradients[name], gradient, name=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("s", "b", "d"), [(4, 2, 6), (7, 1, 5), (1, 3, 2)])
def test_streams_and_weights_cross_a_boundary_bit_for_bit_and_so_do_their_gradients(
    s: int, b: int, d: int, dtype: torch.dtype
) -> None:
    """The weights are float32 in a 16-bit payload, which a plain cast would round."""
    draw, config = loops.random_tensors(3), ResidualConfig("single_pass_mhc", streams=N)
    streams = draw(s, b, N, d).to(dtype).requires_grad_()
    reads = draw(s, b, N).float().requires_grad_()
    payload = StreamState(streams, reads=reads).pack()
    slots = 4 // dtype.itemsize
    assert payload.dtype == dtype and payload.shape == (N * s + -(-N * s * slots // d), b, d)
    arrived = config.entry.unpack(config, payload)
    assert isinstance(arrived, StreamState) and arrived.reads is not None
    assert torch.equal(arrived.streams, streams) and torch.equal(arrived.reads, reads)
    cotangents = draw(s, b, N, d).to(dtype), draw(s, b, N).float()
    torch.autograd.backward((arrived.streams, arrived.reads), cotangents)
    assert streams.grad is not None and torch.equal(streams.grad, cotangents[0])
    assert reads.grad is not None and torch.equal(reads.grad, cotangents[1])


def test_a_payload_of_another_length_is_refused() -> None:
    config = ResidualConfig("single_pass_mhc", streams=N)
    with pytest.raises(ValueError, match="no 3 streams with 3 numbers"):
        config.entry.unpack(config, torch.zeros(N * 4, 2, 6))
