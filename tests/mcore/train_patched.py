# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Script: trains the toy on the Megatron-Core that PYTHONPATH names and saves what it computed.

    train_patched.py FILE

A process of its own, because one process cannot hold two copies of Megatron-Core.
"""

from __future__ import annotations

import importlib
import sys
import warnings

import torch

from megatron_residuals import cpu_host

SPEC = "block_attnres(block_sublayers=3, transport='delta')"
LAYOUTS = {"pp2": dict(pp=2), "pp2-vpp2": dict(pp=2, vpp=2)}


def main(path: str) -> None:
    """Save losses and gradients, and what stood at the seams while they were computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu_host.install()
    import megatron.core

    from megatron_residuals.mcore import install as seams
    from megatron_residuals.testing.residual_toy import spec_for
    from megatron_residuals.testing.toy_gpt import ToyGPT, run_toy

    modules = {seam: importlib.import_module(seam.module) for seam in seams.SEAMS}
    before = {seam: getattr(modules[seam], seam.name) for seam in seams.SEAMS}
    stock = run_toy(ToyGPT(**LAYOUTS["pp2-vpp2"]))
    results = {name: run_toy(ToyGPT(**layout), spec_for(SPEC)) for name, layout in LAYOUTS.items()}
    saved = {
        "host": megatron.core.__path__[0],
        "report": seams.report(),
        "states": [seam.state for seam in seams.SEAMS],
        "replaced": [
            seam.path for seam in before if getattr(modules[seam], seam.name) != before[seam]
        ],
        "results": {name: tuple(result) for name, result in {**results, "stock": stock}.items()},
    }
    torch.save(saved, path)


if __name__ == "__main__":
    main(sys.argv[1])
