# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances, by dtype and by what separates the two computations compared."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kind = Literal["exact", "same_math", "reordered"]


class Tolerance(NamedTuple):
    """Passes when |actual - expected| <= atol + rtol * |expected|, element by element."""

    rtol: float
    atol: float


_EXACT = Tolerance(0.0, 0.0)

TOLERANCES: dict[tuple[torch.dtype, Kind], Tolerance] = {
    # The same operations in the same order: bit for bit.
    (torch.float64, "exact"): _EXACT,
    (torch.float32, "exact"): _EXACT,
    (torch.bfloat16, "exact"): _EXACT,
    (torch.float16, "exact"): _EXACT,
    # The same sums over the same terms, split or associated differently (TP, packed matmuls).
    (torch.float64, "same_math"): Tolerance(1e-12, 1e-13),
    (torch.float32, "same_math"): Tolerance(1e-5, 1e-6),
    (torch.bfloat16, "same_math"): Tolerance(1.6e-2, 1e-3),
    (torch.float16, "same_math"): Tolerance(2e-3, 1e-4),
    # Another algorithm for the same function (online softmax, fused kernel, whole deep models).
    (torch.float64, "reordered"): Tolerance(1e-9, 1e-11),
    (torch.float32, "reordered"): Tolerance(1e-4, 1e-5),
    (torch.bfloat16, "reordered"): Tolerance(4e-2, 1e-2),
    (torch.float16, "reordered"): Tolerance(5e-3, 1e-3),
}


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype,
    kind: Kind,
    name: str = "tensor",
) -> None:
    """Compares two tensors of one shape under `TOLERANCES[dtype, kind]`.

    Args:
        dtype: the precision in which the two were computed (either may be stored wider).
        name: what is compared, for the message.

    Raises:
        AssertionError: shapes differ, one is NaN where the other is not, or the tolerance is
            missed; names the largest absolute and relative error and where the former is.
        KeyError: the table has no such dtype and kind.
    """
    tolerance = TOLERANCES[dtype, kind]
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    left, right = actual.detach().double(), expected.detach().double()
    if torch.allclose(left, right, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return
    error = (left - right).abs()
    relative = error / right.abs().clamp_min(torch.finfo(torch.float64).tiny)
    worst = torch.unravel_index(error.nan_to_num(nan=torch.inf).argmax(), error.shape)
    index = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{name}: max abs error {error.max().item():.3e}, max rel error "
        f"{relative.max().item():.3e} at {index}: got {left[index].item():.9g}, expected "
        f"{right[index].item():.9g}; allowed for {dtype} {kind}: rtol {tolerance.rtol:g}, "
        f"atol {tolerance.atol:g}"
    )
