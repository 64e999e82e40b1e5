# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics look at some tokens of every micro-batch, evenly spaced, never at all of many."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLED_TOKENS = 256


def sample_tokens(tensor: Tensor, feature_dims: int, limit: int = SAMPLED_TOKENS) -> Tensor:
    """At most ``limit`` tokens of [..., features] -> [S, features], in at least float32.

    All tokens where there are no more than the limit. The step between two tokens is odd, so that
    samples of every batch size walk through the whole batch. The same shape gives the same tokens
    on every stage. A view of the tensor where its dtype allows; without history.
    """
    tokens = tensor.detach().flatten(0, -1 - feature_dims)
    step = max(1, -(-tokens.shape[0] // limit)) if tokens.shape[0] > limit else 1
    step += 1 - step % 2
    return tokens[::step].to(torch.promote_types(tensor.dtype, torch.float32))
