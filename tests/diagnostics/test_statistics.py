# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The statistics against loops over matrices written down by hand, and the tokens they look at."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_residuals.diagnostics import statistics
from megatron_residuals.diagnostics.tokens import sample_tokens

# rows sum to 1.5 and -1, columns to 1.25 and -0.75
MIXING = torch.tensor([[0.5, 1.0], [0.75, -1.75]], dtype=torch.float64)


def test_gains_and_errors_of_a_matrix_that_is_not_symmetric() -> None:
    assert statistics.row_gain(MIXING) == 1.5
    assert statistics.column_gain(MIXING) == 1.25
    assert statistics.row_error(MIXING) == 2.0
    assert statistics.column_error(MIXING) == 1.75
    assert statistics.mean_diagonal(MIXING) == -0.625


def loop_gains(h_res: Tensor) -> tuple[list[float], list[float]]:
    """The products of every depth from scratch, token by token."""
    depth, tokens, n, _ = h_res.shape
    forward, backward = [], []
    for i in range(depth):
        rows, columns = [], []
        for t in range(tokens):
            up, down = torch.eye(n, dtype=h_res.dtype), torch.eye(n, dtype=h_res.dtype)
            for j in range(i + 1):
                up = h_res[j, t] @ up
            for j in range(i, depth):
                down = h_res[j, t] @ down
            rows.append(max(abs(sum(row)) for row in up.tolist()))
            columns.append(max(abs(sum(column)) for column in down.T.tolist()))
        forward.append(sum(rows) / tokens)
        backward.append(sum(columns) / tokens)
    return forward, backward


def test_composite_gains_multiply_up_to_a_sublayer_and_from_it_to_the_end() -> None:
    h_res = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    forward, backward = statistics.composite_gains(h_res)
    expected = loop_gains(h_res)
    torch.testing.assert_close(forward.tolist(), expected[0])
    torch.testing.assert_close(backward.tolist(), expected[1])
    assert len({round(value, 6) for value in (*expected[0], *expected[1])}) == 8


def test_composite_gains_of_no_tokens_are_not_numbers() -> None:
    forward, backward = statistics.composite_gains(torch.zeros(2, 0, 2, 2))
    assert forward.isnan().all() and backward.isnan().all()


def test_the_cosine_is_over_pairs_of_different_streams() -> None:
    streams = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    expected = (0 + math.sqrt(0.5) + math.sqrt(0.5)) / 3
    assert statistics.mean_cosine(streams @ streams.T).item() == pytest.approx(expected)
    assert statistics.mean_cosine(torch.ones(5, 1, 1)).tolist() == [1.0] * 5
    assert statistics.mean_cosine(torch.zeros(2, 2)) == 0.0


def test_entropy_is_one_for_equal_weights_and_zero_for_one_source() -> None:
    weights = torch.tensor([[0.25] * 4, [0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    assert statistics.relative_entropy(weights).tolist() == pytest.approx([1.0, 0.0, 0.5])
    assert statistics.relative_entropy(torch.ones(2, 1)).tolist() == [1.0, 1.0]


def test_a_gate_is_saturated_within_a_hundredth_of_its_ends() -> None:
    gate = torch.tensor([0.005, 0.02, 0.5, 0.995])
    assert statistics.saturated_share(gate) == 0.5


def test_few_tokens_are_all_taken_and_not_copied() -> None:
    x = torch.randn(16, 2, 8, requires_grad=True)
    taken = sample_tokens(x, 1, limit=32)
    assert taken.shape == (32, 8) and not taken.requires_grad
    assert taken.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [65, 128, 1000])
def test_many_tokens_are_sampled_evenly_over_length_and_batch(length: int, batch: int) -> None:
    position = torch.arange(length).view(-1, 1, 1).expand(-1, batch, 1)
    member = torch.arange(batch).view(1, -1, 1).expand(length, -1, 1)
    taken = sample_tokens(torch.cat([position, member], -1).float(), 1, limit=64)
    assert 64 / 3 <= len(taken) <= 64
    assert taken[-1, 0] > 0.9 * length
    if batch != 3:  # an odd step may share a factor with an odd batch
        assert set(taken[:, 1].tolist()) == set(range(batch))


def test_sampled_16_bit_tokens_are_widened_and_matrices_keep_their_shape() -> None:
    x = torch.randn(40, 2, 4, 4).bfloat16()
    taken = sample_tokens(x, 2, limit=16)
    assert taken.dtype == torch.float32 and taken.shape[1:] == (4, 4) and len(taken) <= 16
    assert sample_tokens(x.double(), 2).dtype == torch.float64
