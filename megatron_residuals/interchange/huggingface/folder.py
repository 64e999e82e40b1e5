# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Writing the folder: configuration, shards of tensors, and the source of the model.

Nothing larger than a shard is ever in memory.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_residuals.config import ResidualConfig
from megatron_residuals.files import json_object, read_text, written_beside
from megatron_residuals.interchange import tensor_file
from megatron_residuals.interchange.huggingface.tensors import Part, split
from megatron_residuals.interchange.stored import Checkpoint

MODELING = "modeling_residual_gpt"
MODEL_TYPE = "residual_gpt"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model")
CLASSES = {
    "AutoConfig": "ResidualGPTConfig",
    "AutoModel": "ResidualGPTModel",
    "AutoModelForCausalLM": "ResidualGPTForCausalLM",
}
_OURS = re.compile(r"^from (megatron_residuals\.([\w.]+)) import", re.MULTILINE)


def exported_module(config: ResidualConfig) -> ModuleType:
    """The source of a mechanism in exported models.

    Raises:
        ValueError: it has none, or none with these options.
    """
    module = config.entry.exported()
    if module is None or config.mechanism not in module.MECHANISMS:
        raise ValueError(
            f"the mechanism is {config.mechanism!r}, which has no form outside of Megatron-Core; "
            "its entry gives one by exported()"
        )
    usual = ResidualConfig(config.mechanism).binding_options()
    for name, value in config.binding_options().items():
        if name not in module.OPTIONS and value != usual[name]:
            raise ValueError(
                f"{name} is {value!r}, which exported models do not have; theirs is {usual[name]!r}"
            )
    return module


def refuse_foreign(folder: Path, force: bool) -> None:
    """Nothing is overwritten but an exported folder, and that if asked for.

    Raises:
        ValueError: the folder exists.
    """
    if not folder.exists():
        return
    if not is_exported(folder):
        raise ValueError(f"{folder} exists and is no exported model; give another path")
    if not force:
        raise ValueError(f"{folder} exists; give another path, or --force to replace it")


def is_exported(folder: Path) -> bool:
    """Whether a folder is an exported model."""
    return (folder / CONFIG).is_file() and read_config(folder).get("model_type") == MODEL_TYPE


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    return json_object(read_text(folder / CONFIG), folder / CONFIG)


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    config: Mapping[str, Any],
    module: ModuleType,
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = 2**32,
) -> int:
    """Write an exported model; returns the number of shards.

    Args:
        config: of ``ResidualGPTConfig``, the settings of the residual among it.
        module: the source of the mechanism (``exported_module``).
        tokenizer: a folder whose tokenizer is copied.

    Raises:
        ValueError: it cannot be written, or a tensor cannot be read.
        RuntimeError: safetensors is not installed.
    """
    tensor_file.require()
    with written_beside(folder, replace=True) as beside:
        beside.mkdir(parents=True)
        for name, source in sources(module).items():
            (beside / name).write_text(source, encoding="utf-8")
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, beside)
        dtype, shards = _write_shards(beside, checkpoint, parts, config, shard_bytes)
        whole = {
            "architectures": [CLASSES["AutoModelForCausalLM"]],
            "model_type": MODEL_TYPE,
            "auto_map": {auto: f"{MODELING}.{name}" for auto, name in CLASSES.items()},
            "dtype": str(dtype).removeprefix("torch."),
            **config,
        }
        (beside / CONFIG).write_text(json.dumps(whole, indent=2), encoding="utf-8")
    return shards


def sources(module: ModuleType) -> dict[str, str]:
    """{file: text} of the model: what is imported of ours lies beside it, and is found there.

    transformers copies the files that ``from .file import name`` names, and no others.
    """
    package = "megatron_residuals.interchange.huggingface"
    text = Path(__file__).with_name(f"{MODELING}.py").read_text(encoding="utf-8")
    # in the package the file describes the plain residual
    text = text.replace("megatron_residuals.mechanisms.plain.exported", f"{package}.residual")
    found, waiting = {}, {MODELING: text, "residual": inspect.getsource(module)}
    while waiting:
        name, text = waiting.popitem()
        for dotted, _ in _OURS.findall(text):
            file = dotted.rpartition(".")[2]
            if file not in (MODELING, "residual") and f"{file}.py" not in found:
                waiting[file] = inspect.getsource(import_module(dotted))
        found[f"{name}.py"] = _OURS.sub(
            lambda match: f"from .{match[2].rpartition('.')[2]} import", text
        )
    return found


def _copy_tokenizer(source: Path, target: Path) -> None:
    files = {path for pattern in TOKENIZER for path in source.glob(pattern) if path.is_file()}
    if not files:
        raise ValueError(f"{source} has no tokenizer of transformers (tokenizer.json, …)")
    for path in files:
        shutil.copy2(path, target / path.name)


def _write_shards(
    folder: Path,
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    config: Mapping[str, Any],
    shard_bytes: int,
) -> tuple[torch.dtype, int]:
    """Write the tensors and their index; the dtype of the model, and the number of files."""
    names: list[list[str]] = []
    dtype, total = torch.float32, 0
    for tensors in _shards(checkpoint, parts, config, shard_bytes):
        tensor_file.write_tensors(folder / f"{len(names)}.safetensors", tensors, {})
        if not names:
            dtype = tensors["model.embed_tokens.weight"].dtype
        total += sum(tensor.nbytes for tensor in tensors.values())
        names.append(list(tensors))
    files = [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    for number, file in enumerate(files):
        (folder / f"{number}.safetensors").rename(folder / file)
    where = {name: file for file, held in zip(files, names, strict=True) for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return dtype, len(files)


def _shards(
    checkpoint: Checkpoint, parts: Sequence[Part], config: Mapping[str, Any], shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for part in parts:
        tensor = checkpoint.part(part.key, part.place)
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard |= {name: t.clone() for name, t in split(part, tensor, config).items()}
        held += tensor.nbytes
    yield shard


def differing(
    folder: Path, checkpoint: Checkpoint, parts: Sequence[Part], config: Mapping[str, Any]
) -> Iterator[str]:
    """Names of exported tensors that are not, bit for bit, the checkpoint's."""
    where = json_object(read_text(folder / INDEX), folder / INDEX)["weight_map"]
    assert isinstance(where, dict), "written here"
    for part in parts:
        tensor = checkpoint.part(part.key, part.place)
        for name, expected in split(part, tensor, config).items():
            (found,) = tensor_file.read_tensors(folder / where[name], name.__eq__).values()
            same_kind = (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if not same_kind or not torch.equal(_bits(found), _bits(expected)):
                yield name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
