# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""A residual's parameters in a safetensors file under public names, with their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_residuals._version import __version__
from megatron_residuals.config import ResidualConfig
from megatron_residuals.files import json_object, read_text, written_beside
from megatron_residuals.interchange import tensor_file
from megatron_residuals.mechanisms import TABLE, mechanism_in_file
from megatron_residuals.mechanisms.base import PublicLayout
from megatron_residuals.pipeline.layout import gpt_sublayers
from megatron_residuals.settings import (
    BLOCK_LENGTH,
    RECORD,
    Setting,
    as_record,
    compare_settings,
    settings_of,
)
from megatron_residuals.text import raise_faults

LAYOUT, MODEL_TYPE = "layout", "model_type"


def layouts() -> list[PublicLayout]:
    """The public layouts of the built-in mechanisms."""
    found = (entry.public_layout() for entry in TABLE)
    return list(dict.fromkeys(layout for layout in found if layout is not None))


def layout_for(config: ResidualConfig) -> PublicLayout:
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
    """The configuration that a settings record is of; what the record leaves free is default.

    Raises:
        ValueError: the record has settings that are unknown or out of range.
    """
    entry = mechanism_in_file(str(record["mechanism"]))
    return ResidualConfig.from_mapping({"mechanism": entry.name, **entry.options_in(record)})


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
        ValueError: the mechanism, or one of its settings, has no form in the public layout; the
            file exists or cannot be written.
        RuntimeError: safetensors is not installed.
    """
    tensors, layout = export_residual(parameters, config, num_layers)
    metadata = {
        "producer": f"megatron_residuals {__version__}",
        LAYOUT: layout,
        RECORD: json.dumps(settings_of(config, num_layers)),
        "config": json.dumps(layout_for(config).public_config(config, num_layers)),
    }
    tensor_file.require()
    with written_beside(path) as beside:
        tensor_file.write_tensors(beside, tensors, metadata)


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
    released ones. What neither says is taken to be as in ``config`` (see ``taken_from_flags``),
    except for the convention of a file with DeepSeek-V4's names, which is ``dsv4``.

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
        others = [other.NAME for other in layouts() if any(map(other.matches, names))]
        held = f"its names are {others[0]}'s" if others else "it has neither's"
        raise ValueError(f"{path} holds no {layout.NAME} parameters of a residual; {held}")
    given = settings_of(config, num_layers)
    said = _said(path, layout, num_layers)
    saved = {**given, **{name: value for name, value in said.items() if name != MODEL_TYPE}}
    if convert_convention and "mhc_convention" in saved:
        saved["mhc_convention"] = given["mhc_convention"]
    if "contraction" in saved:  # the head in the file is judged when it is imported
        saved["contraction"] = given["contraction"]
    faults = compare_settings(saved, given, convert_block_length=convert_block_length)
    raise_faults(str(path), [f"{fault}." for fault in faults])
    tensors = tensor_file.read_tensors(path, layout.matches)
    try:
        parameters: dict[str, Tensor] = layout.import_parameters(
            tensors, config, num_layers, hidden_size
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return parameters


def taken_from_flags(path: Path, config: ResidualConfig, num_layers: int) -> list[str]:
    """What a file under public names does not say, so that it is taken to be as in ``config``."""
    layout = layout_for(config)
    said = _said(path, layout, num_layers)
    wanted = {MODEL_TYPE: layout.MODEL_TYPES[0], **settings_of(config, num_layers)}
    elsewhere = ("mechanism", "contraction")  # the names and the head of a file tell them
    return [
        f"{name} {value}"
        for name, value in wanted.items()
        if name not in said and name not in elsewhere
    ]


def _said(path: Path, layout: PublicLayout, num_layers: int) -> dict[str, Setting]:
    """What a file, or the configuration beside it, says about its model and its settings.

    Raises:
        ValueError: it is of another model, or of settings that no model here has.
    """
    metadata = tensor_file.read_metadata(path)
    if RECORD in metadata:
        record = as_record(json_object(metadata[RECORD], path), path)
        return {MODEL_TYPE: layout.MODEL_TYPES[0], **record}
    beside = (path if path.is_dir() else path.parent) / "config.json"
    said: dict[str, Setting] = dict(layout.SAID)
    if beside.is_file():
        faults: list[str] = []
        said |= _translated(_public_settings(beside), layout, faults)
        raise_faults(str(beside), faults)
    if BLOCK_LENGTH in said:  # a block is at most the whole model
        said[BLOCK_LENGTH] = min(said[BLOCK_LENGTH], len(gpt_sublayers(num_layers)))
    return said


def _public_settings(path: Path) -> dict[str, object]:
    """A released configuration, that of its language model included; null says nothing."""
    public = json_object(read_text(path), path)
    text = {} if public.get("text_config") is None else public["text_config"]
    if not isinstance(text, dict):
        raise ValueError(f"{path}: text_config is {text!r}; it must be an object, or null")
    whole_model = {MODEL_TYPE: public.get(MODEL_TYPE)}
    return {
        name: value
        for part in (public, text, whole_model)
        for name, value in part.items()
        if value is not None
    }


def _translated(
    public: Mapping[str, object], layout: PublicLayout, faults: list[str]
) -> dict[str, Setting]:
    """A released configuration in our words, and what it says that we cannot."""
    said: dict[str, Setting] = {}
    if MODEL_TYPE in public:
        said[MODEL_TYPE] = layout.MODEL_TYPES[0]
        if public[MODEL_TYPE] not in layout.MODEL_TYPES:
            faults.append(
                f"{MODEL_TYPE} is {public[MODEL_TYPE]!r}, where the same names may mean another "
                f"model; known is {' and '.join(layout.MODEL_TYPES)}."
            )
    faults.extend(
        f"{word} is {public[word]!r}; here there is only {value}."
        for word, value in layout.FIXED.items()
        if word in public and public[word] != value
    )
    told_by: dict[str, str] = {}
    for word, (name, factor) in layout.SETTINGS.items():
        if word not in public:
            continue
        value = public[word]
        if not isinstance(value, int | type(factor)) or isinstance(value, bool) or not value > 0:
            kind = "whole number" if isinstance(factor, int) else "number"
            faults.append(f"{word} is {value!r}; it must be a {kind} above 0.")
        elif said.setdefault(name, value * factor) != value * factor:
            faults.append(
                f"{told_by[name]} is {said[name]!r} and {word} {value!r}; {name} stands for both "
                "here, so there is no such model."
            )
        else:
            told_by.setdefault(name, word)
    return said
