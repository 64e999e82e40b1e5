# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Without a GPU, Triton's interpreter runs the kernels; it has to be asked for before they load."""

from __future__ import annotations

import importlib.util
import os

import torch

from tests.kernels.interpreter import repair

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        repair()
