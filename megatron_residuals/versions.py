# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The versions that the package is tested with: for setup.py, its checks and its documents.

setup.py runs this file by itself, where nothing is installed yet: it imports the standard library
only.
"""

from __future__ import annotations

import re

# Tests run with the oldest of each at once (.ci/requirements/oldest.txt), but for Transformer
# Engine, which needs a GPU, and for Triton and the libraries of kernels, which need a newer torch
# than that: with the Triton 3.2 that torch 2.6 brings, mHC's kernels do not compile.
OLDEST = {
    "python": "3.10",
    "torch": "2.6",
    "megatron-core": "0.16.1",
    "transformer-engine": "2.0",
    "triton": "3.5",
    "fla-core": "0.6",
    "liger-kernel": "0.8.5",
    "safetensors": "0.4",
    "wandb": "0.16",
    "tensorboard": "2.14",
    "jinja2": "3.1",
    "matplotlib": "3.8",
    "omegaconf": "2.3",
}
# The first releases that nothing is known about.
UNTESTED = {"megatron-core": "0.20"}
# Megatron-Core from this release on loads checkpoints with an option that torch has from 2.7 on.
NEWER_TORCH_FROM_HOST, NEWER_TORCH = "0.18", "2.7"
# From here on, ranks that make a process group without the others give it the same name.
ALIKE_NAMES_TORCH = "2.14"


def specifier(package: str) -> str:
    """The versions of a package that are supported, as pip writes them: ``>=0.16.1,<0.20``."""
    end = f",<{UNTESTED[package]}" if package in UNTESTED else ""
    return f">={OLDEST[package]}{end}"


def requirement(package: str) -> str:
    """The package with its versions, as pip takes it."""
    return f"{package}{specifier(package)}"


def is_too_old(package: str, version: str) -> bool:
    """Whether a version is older than the oldest that is tested.

    Local parts and pre-releases do not count: containers hold ``2.6.0a0+ecf3bae40a.nv25.01``.
    """
    return _release(version) < _release(OLDEST[package])


def host_needs_newer_torch(host: str, torch: str) -> bool:
    """Whether this release of Megatron-Core cannot load its checkpoints with this torch."""
    is_newer_host = _release(host) >= _release(NEWER_TORCH_FROM_HOST)
    return is_newer_host and _release(torch) < _release(NEWER_TORCH)


def names_groups_alike(torch: str) -> bool:
    """Whether the members of a process group can make it by themselves with this torch."""
    return _release(torch) >= _release(ALIKE_NAMES_TORCH)


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise ValueError(f"{version!r} is no version: it does not begin with a number")
    return tuple(int(number) for number in numbers[0].split("."))
