# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which implementation computes: what makes Triton unusable is found before a kernel is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_residuals.kernels.common import dispatch


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The answer is kept for the life of a process."""
    dispatch._triton_fault.cache_clear()
    yield
    dispatch._triton_fault.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_a_triton_that_is_too_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 brings Triton 3.2, with which mHC's kernels do not compile: `auto` took them."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    monkeypatch.setattr(dispatch, "interpreting", lambda: True)
    assert dispatch.triton_fault() == "triton 3.2.0 is too old"
    with pytest.raises(RuntimeError, match=r"triton 3\.2\.0 is too old; .*'triton>="):
        dispatch.resolve("triton", torch.zeros(2))
