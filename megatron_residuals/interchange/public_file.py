# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A residual's parameters in a safetensors file under public names, with their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from torch import Tensor

from megatron_residuals._version import __version__
from megatron_residuals.config import ResidualConfig
from megatron_residuals.depth import raise_faults
from megatron_residuals.interchange import tensor_file
from megatron_residuals.mechanisms import TABLE
from megatron_residuals.mechanisms.sources import Sources, kimi_k3
from megatron_residuals.mechanisms.streams import deepseek_v4
from megatron_residuals.settings import (
    BLOCK_LENGTH,
    RECORD,
    Setting,
    compare_settings,
    settings_of,
)

LAYOUT = "layout"
_LAYOUTS = (deepseek_v4, kimi_k3)


def layout_for(config: ResidualConfig) -> ModuleType:
    """The public layout of a mechanism.

    Raises:
        ValueError: it has none.
    """
    if (layout := config.entry.public_layout()) is not None:
        return layout
    named = [(entry.name, layout.NAME) for entry in TABLE if (layout := entry.public_layout())]
    known = ", ".join(f"{name} ({layout})" for name, layout in named)
    raise ValueError(f"the mechanism is {config.mechanism!r}; public names exist for {known}")


def config_of(record: Mapping[str, Setting]) -> ResidualConfig:
    """The configuration that a settings record is of; what the record leaves free is default."""
    options = dict(record)
    if record["mechanism"] == "attnres":  # its record says the length that it always has
        options.pop(BLOCK_LENGTH, None)
    return ResidualConfig.from_mapping(options)


def export_residual(
    parameters: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
) -> tuple[dict[str, Tensor], str]:
    """The parameters of a residual under public names, and the name of the layout.

    Raises:
        ValueError: the mechanism, or one of its settings, has no form in the public layout.
    """
    layout = layout_for(config)
    return layout.export_parameters(parameters, config, num_layers), layout.NAME


def write_residual(
    path: Path, parameters: Mapping[str, Tensor], config: ResidualConfig, num_layers: int
) -> None:
    """Write the parameters of a residual under public names.

    The header carries the layout, the settings record, and the options under the names that the
    public models' own configurations use.

    Raises:
        ValueError: the mechanism, or one of its settings, has no form in the public layout.
        RuntimeError: safetensors is not installed.
    """
    tensors, layout = export_residual(parameters, config, num_layers)
    metadata = {
        "producer": f"megatron_residuals {__version__}",
        LAYOUT: layout,
        RECORD: json.dumps(settings_of(config, num_layers)),
        "config": json.dumps(_public_config(config, num_layers)),
    }
    tensor_file.write_tensors(path, tensors, metadata)


def _public_config(config: ResidualConfig, num_layers: int) -> dict[str, Setting]:
    if isinstance(config.entry, Sources):
        return {
            "attn_res_block_size": kimi_k3.block_layers(config, num_layers),
            "rms_norm_eps": config.attnres_eps,
        }
    return {
        "hc_mult": config.streams,
        "hc_sinkhorn_iters": config.mhc_sinkhorn_iterations,
        "hc_eps": config.resolved_mhc_eps,
        "rms_norm_eps": config.resolved_mhc_eps,
    }


def read_residual(
    path: Path,
    config: ResidualConfig,
    num_layers: int,
    hidden_size: int,
    *,
    convert_convention: bool = False,
    convert_block_length: bool = False,
) -> dict[str, Tensor]:
    """Parameters of a model from a file, or a folder of files, under public names.

    Settings are read from the header of our own files, otherwise from a ``config.json`` beside
    released ones. What neither says is taken to be as in ``config``, except for the convention of
    a file with DeepSeek-V4's names, which is ``dsv4``.

    Args:
        convert_convention: take mHC parameters over into the other convention. They are the same
            function when mhc_eps is negligible (``--residual-mhc-eps 1e-20`` on both sides);
            otherwise gates and matrices differ by a small multiple of it.
        convert_block_length: take AttnRes parameters over into blocks of another length.

    Raises:
        ValueError: no such parameters, or they are of other settings, layers or sizes.
        RuntimeError: safetensors is not installed.
    """
    layout = layout_for(config)
    names = list(tensor_file.read_shapes(path))
    if not any(map(layout.matches, names)):
        others = [other.NAME for other in _LAYOUTS if any(map(other.matches, names))]
        held = f"its names are {others[0]}'s" if others else "it has neither's"
        raise ValueError(f"{path} holds no {layout.NAME} parameters of a residual; {held}")
    given = settings_of(config, num_layers)
    saved = {**given, **_record(path, layout.NAME)}
    if convert_convention and "mhc_convention" in saved:
        saved["mhc_convention"] = given["mhc_convention"]
    if "contraction" in saved:  # the head in the file is judged when it is imported
        saved["contraction"] = given["contraction"]
    faults = compare_settings(saved, given, convert_block_length=convert_block_length)
    raise_faults(str(path), [f"{fault}." for fault in faults])
    tensors = tensor_file.read_tensors(path, layout.matches)
    parameters: dict[str, Tensor] = layout.import_parameters(
        tensors, config, num_layers, hidden_size
    )
    return parameters


def _record(path: Path, layout: str) -> dict[str, Setting]:
    """What is known about the settings of a file."""
    metadata = tensor_file.read_metadata(path)
    if RECORD in metadata:
        record: dict[str, Setting] = json.loads(metadata[RECORD])
        return record
    beside = (path if path.is_dir() else path.parent) / "config.json"
    public = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    public = {**public, **public.get("text_config", {})}
    if layout == kimi_k3.NAME:
        known = {"attnres_eps": public.get("rms_norm_eps")}
        if "attn_res_block_size" in public:
            known[BLOCK_LENGTH] = 2 * public["attn_res_block_size"]
    else:
        known = {
            "mhc_convention": "dsv4",
            "streams": public.get("hc_mult"),
            "mhc_sinkhorn_iterations": public.get("hc_sinkhorn_iters"),
            "mhc_eps": public.get("hc_eps"),
        }
    return {name: value for name, value in known.items() if value is not None}
