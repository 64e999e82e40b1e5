# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The precision of coefficients: at least float32, whatever the activations and autocast say."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype among them, at least float32."""
    return functools.reduce(torch.promote_types, [each.dtype for each in tensors], torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype where that is wider."""
    return tensor.to(wide_dtype(tensor))


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which matrix products keep the dtype of their operands."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
