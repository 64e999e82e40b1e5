# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba and Gated DeltaNet of the host without the CUDA packages that bring their kernels.

The host's mixers import `mamba_ssm` and `fla` by name. While they are imported, and then only,
those names lead to `mixer_kernels`: classes, parameters, sharding and checkpoint keys of the mixers
are the host's own, and whoever else looks for the packages finds what is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from megatron_residuals.cpu_host import mixer_kernels

_STAND_INS = {
    "mamba_ssm.ops.triton.layernorm_gated": ("RMSNorm",),
    "mamba_ssm.ops.triton.ssd_combined": (
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
    ),
    "fla.modules.convolution": ("causal_conv1d",),
    "fla.modules.l2norm": ("l2norm",),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule",),
}


def supply_mixer_kernels() -> str:
    """Mamba and Gated DeltaNet raise without packages whose kernels are written for a GPU."""
    with _stand_ins():
        mamba_mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
        importlib.import_module("megatron.core.ssm.gated_delta_net")
    # Triton kernels of the host's own, with PyTorch beside them for one token at a time.
    vars(mamba_mixer).update(selective_state_update=None, causal_conv1d_update=None)
    packages = ", ".join(f"{name} ({_presence(name)})" for name in ("mamba_ssm", "fla"))
    return f"kernels of Mamba and Gated DeltaNet: plain PyTorch instead of {packages}"


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """`causal_conv1d` is hidden: without it the host convolves in PyTorch."""
    names = [name for name in sys.modules if name.split(".")[0] in ("mamba_ssm", "fla")]
    former = {name: sys.modules.pop(name) for name in names}
    hidden = {"causal_conv1d": sys.modules.get("causal_conv1d")}
    ours: dict[str, Any] = {**_modules(), "causal_conv1d": None}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del sys.modules[name]
        sys.modules.update(former)
        sys.modules.update({name: module for name, module in hidden.items() if module})


def _modules() -> dict[str, types.ModuleType]:
    modules: dict[str, types.ModuleType] = {}
    for path, names in _STAND_INS.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            package = ".".join(parts[:length])
            modules.setdefault(package, types.ModuleType(package))
        for name in names:
            setattr(modules[path], name, getattr(mixer_kernels, name))
    return modules


def _presence(name: str) -> str:
    installed = importlib.util.find_spec(name) is not None
    return "installed, but its kernels need a GPU" if installed else "not installed"
