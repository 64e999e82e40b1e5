# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""`megatron-residuals doctor`: what is installed, where we would come in, and what would fail."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_residuals._version import __version__
from megatron_residuals.mechanisms import TABLE
from megatron_residuals.text import reason
from megatron_residuals.versions import (
    NEWER_TORCH,
    OLDEST,
    host_needs_newer_torch,
    is_too_old,
    requirement,
)

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

INSTALL_HOST = f"install a supported release: pip install '{requirement('megatron-core')}'"
INSTALL_TORCH = f"install it: pip install '{requirement('torch')}'"
COMPLETE_HOST = "see that what megatron-core needs is installed, in matching versions: pip check"
# Parts of names of host options that are residual connections of the host's own.
NATIVE_RESIDUALS = ("mhc", "hyper_connection", "attention_residual", "attn_res", "wide_residual")


@dataclasses.dataclass
class Findings:
    """What an examination found; `problems` would stop a training run, `notes` would not."""

    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    host_path: str | None = None
    tested_window: str | None = None
    in_tested_window: bool | None = None
    megatron_training: bool = False
    native_residual_options: list[str] = dataclasses.field(default_factory=list)
    gpus: list[str] = dataclasses.field(default_factory=list)
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    seams: list[dict[str, str]] = dataclasses.field(default_factory=list)
    symbols: list[dict[str, str]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def register(commands: Subparsers) -> None:
    """`doctor`: what is installed, and what would stop a training run."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation and the host",
        description="Print versions, the seams of the host as they would be in a run, and what "
        "would stop a training run, with what to do about it. Changes nothing. The exit status is "
        "1 if there is such a problem.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Examine and print; 1 if something would stop a training run."""
    # Megatron warns of every accelerator library that is not there, some of it on stdout.
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        findings = examine()
    print(json.dumps(dataclasses.asdict(findings), indent=2) if args.json else describe(findings))
    return int(bool(findings.problems))


def examine() -> Findings:
    """Look at everything; what cannot be looked at becomes a problem, not an exception."""
    findings = Findings()
    findings.versions = {"python": platform.python_version(), "megatron-residuals": __version__}
    findings.kernels = {entry.name: entry.kernels or "none: plain PyTorch" for entry in TABLE}
    for package in OLDEST:
        findings.versions.setdefault(package, installed_version(package))
    torch = _import("torch", findings, INSTALL_TORCH)
    if torch is not None:
        findings.versions["torch"] = torch.__version__
    _examine_versions(findings)
    if torch is None:
        if importlib.util.find_spec("megatron") is None:
            findings.problems.append(f"megatron.core is not there; {INSTALL_HOST}")
        return findings
    _examine_gpus(findings)
    if findings.versions["transformer-engine"] is not None:
        advice = "install it whole, pip install 'transformer-engine[pytorch]', or uninstall it"
        _import("transformer_engine.pytorch", findings, advice)
    is_there = findings.versions["megatron-core"] is not None
    host = _import("megatron.core", findings, COMPLETE_HOST if is_there else INSTALL_HOST)
    if host is not None:
        findings.versions["megatron-core"] = host.__version__
        findings.host_path = str(Path(host.__file__).parent)
        _examine_torch_for_host(findings)
        _examine_host(findings)
        _examine_training(findings)
    return findings


def installed_version(package: str) -> str | None:
    """Version in the metadata of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import(name: str, findings: Findings, advice: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a half-installed library raises anything
        findings.problems.append(f"{name} cannot be imported ({reason(error)}); {advice}")
        return None


def _examine_versions(findings: Findings) -> None:
    """What is older than the oldest that is tested: torch stops a run, optional libraries do not.

    pip does not install this package into an older Python; the host's window is looked at below.
    """
    for package in [name for name in OLDEST if name not in ("python", "megatron-core")]:
        version = findings.versions[package]
        if version is not None and is_too_old(package, version):
            found = findings.problems if package == "torch" else findings.notes
            found.append(
                f"{package} {version} is too old; update it: pip install '{requirement(package)}'"
            )


def _examine_torch_for_host(findings: Findings) -> None:
    host, torch = (str(findings.versions[name]) for name in ("megatron-core", "torch"))
    if not is_too_old("torch", torch) and host_needs_newer_torch(host, torch):
        findings.problems.append(
            f"megatron-core {host} cannot load checkpoints with torch {torch}; update it: "
            f"pip install 'torch>={NEWER_TORCH}'"
        )


def _examine_gpus(findings: Findings) -> None:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        findings.gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    else:
        findings.notes.append(
            "no GPU is visible here; run where there is one, or on the CPU with "
            "`python -m megatron_residuals.run --cpu-host`"
        )


def _examine_host(findings: Findings) -> None:
    """The window of versions, the seams, and residual options of the host's own."""
    compat = _import("megatron_residuals.mcore.compat", findings, COMPLETE_HOST)
    seams = compat and _import("megatron_residuals.mcore.install", findings, COMPLETE_HOST)
    if not seams:
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    oldest, newest = compat.OLDEST_HOST, compat.NEWEST_HOST
    findings.tested_window = f"[{oldest}, {newest})"
    findings.in_tested_window = oldest <= compat.host_version() < newest
    findings.native_residual_options = [
        field.name
        for field in dataclasses.fields(TransformerConfig)
        if any(part in field.name for part in NATIVE_RESIDUALS)
    ]
    _examine_symbols(findings)
    was_installed = seams.is_installed()
    try:
        seams.install()
    except (Exception, SystemExit) as error:
        findings.problems.append(str(error))
    findings.seams = [
        {"state": seam.state, "path": seam.path, "purpose": seam.purpose} for seam in seams.SEAMS
    ]
    if not was_installed:
        seams.uninstall()


def _examine_symbols(findings: Findings) -> None:
    """What of the host we subclass, replace or call, and whether it is as expected."""
    symbols = _import("megatron_residuals.mcore.symbols", findings, COMPLETE_HOST)
    if not symbols:
        return
    findings.symbols = symbols.symbol_table()
    findings.problems += [
        f"{row['path']} {row['fault']}; it is needed ({row['use']}): {INSTALL_HOST}"
        for row in findings.symbols
        if row["state"] == "missing"
    ]


def _examine_training(findings: Findings) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        findings.notes.append(
            "this megatron-core has no megatron.training, which Megatron's own scripts need; "
            "wheels from 0.17 on have it, for 0.16 put a Megatron-LM tree on PYTHONPATH"
        )
        return
    advice = "install what it asks for: pip install 'megatron-residuals[demo]'"
    findings.megatron_training = _import("megatron.training", findings, advice) is not None
    makefile = Path(findings.host_path or "", "datasets", "Makefile")
    if findings.megatron_training and not makefile.exists():
        # Wheels carry the helpers compiled, but their start-up code runs `make` all the same.
        fault = f"megatron.training runs `make` when it starts, and {makefile} does not exist"
        if findings.gpus:
            findings.problems.append(f"{fault}; give it one: printf 'all:\\n' > {makefile}")
        else:
            findings.notes.append(f"{fault}; --cpu-host leaves that step out")


def describe(findings: Findings) -> str:
    """The findings as text."""
    tested = {True: "inside", False: "outside", None: "not compared with"}
    window = f"{tested[findings.in_tested_window]} the tested window {findings.tested_window or ''}"
    lines = ["versions"]
    lines += [f"  {name:<20}{text or 'not installed'}" for name, text in findings.versions.items()]
    lines += ["host"]
    if findings.host_path is not None:
        lines += [
            f"  {'path':<20}{findings.host_path}",
            f"  {'version':<20}{window.rstrip()}",
            f"  {'megatron.training':<20}{'importable' if findings.megatron_training else 'no'}",
            f"  {'own residuals':<20}{', '.join(findings.native_residual_options) or 'none'}",
        ]
    lines += [f"  {'GPUs':<20}{', '.join(findings.gpus) or 'none visible'}"]
    lines += ["on GPUs Triton computes, with --residual-kernels auto"]
    lines += [f"  {name:<20}{text}" for name, text in findings.kernels.items()]
    lines += ["seams, as they would be in a run"]
    lines += [f"  {seam['state']:<10}{seam['path']}: {seam['purpose']}" for seam in findings.seams]
    lines += [] if findings.seams else ["  not examined"]
    lines += ["host symbols that are subclassed, replaced or called"]
    for row in findings.symbols:
        fault = f" [{row['fault']}]" if row["fault"] else ""
        lines.append(f"  {row['state']:<10}{row['path']}: {row['use']}{fault}")
    lines += [] if findings.symbols else ["  not examined"]
    for heading, texts in (("notes", findings.notes), ("problems", findings.problems)):
        lines += [heading, *(f"  - {text}" for text in texts or ["none"])]
    return "\n".join(lines)
