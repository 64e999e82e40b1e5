# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, or made to do harm: one line that names the file, nothing written.

Most of them once ended in a traceback, some ran code of the file or wrote outside the output.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_residuals.cli import main
from megatron_residuals.interchange import ModelShape, open_checkpoint, tensor_file
from megatron_residuals.interchange.pickles import Trust
from tests.interchange import cases
from tests.interchange.cases import HIDDEN, LAYERS, dense_tensors
from tests.interchange.test_checkpoints import (
    CONFIG,
    RECORD,
    write_all_iterations,
    write_legacy,
    write_torch_dist,
)

BLOCKS = ("--residual", "block_attnres", "--residual-block-layers", "2")
pytestmark = pytest.mark.filterwarnings(
    r"ignore:torch\.distributed is (disabled|unavailable):UserWarning"
)


def listing(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(
    capsys: pytest.CaptureFixture[str], source: Path, *words: str, target: str = "output"
) -> str:
    """The one line of a refusal; neither the input nor anything beside it may have changed."""
    capsys.readouterr()
    before = listing(source.parent)
    assert main(["convert", str(source), str(source.parent / target), *(words or BLOCKS)]) == 2
    captured = capsys.readouterr()
    assert listing(source.parent) == before
    assert sorted(path.name for path in source.parent.iterdir()) == [source.name]
    (line,) = captured.err.splitlines()
    assert captured.out == "" and str(source) in line, line
    return line


def edit_index(folder: Path, edit: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    edit(index)
    path.write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    "text", ["../x", "/tmp/x", "7/../../x", "-1", "", "٧", "9" * 5000, b"\xff"]
)
def test_a_tracker_names_a_number_or_release_and_never_a_path(
    text: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # "../x" was joined to the output's path: the input was overwritten while it was mapped
    write_all_iterations(tmp_path / "input")
    tracker = tmp_path / "input" / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert str(tracker) in refused(capsys, tmp_path / "input")


def test_a_released_model_is_converted_and_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_torch_dist(tmp_path / "input" / "release", common_file=True)
    tracker = tmp_path / "input" / "latest_checkpointed_iteration.txt"
    tracker.write_text("8")
    assert "names iter_0000008, and there is no such folder" in refused(capsys, tmp_path / "input")
    tracker.write_text("release\n")
    assert main(["convert", str(tmp_path / "input"), str(tmp_path / "out"), *BLOCKS]) == 0
    assert open_checkpoint(tmp_path / "out").inside == Path("release")


@pytest.mark.parametrize("path", ["../escaped.distcp", "/tmp/escaped.distcp", "a/../../x.distcp"])
def test_an_index_that_leads_out_of_its_folder_is_refused(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # data was read from, and written to, wherever the index said
    def lead_out(index: Any) -> None:
        for item, place in index.storage_data.items():
            index.storage_data[item] = dataclasses.replace(place, relative_path=path)

    write_torch_dist(tmp_path / "input", common_file=True)
    edit_index(tmp_path / "input", lead_out)
    assert repr(path) in refused(capsys, tmp_path / "input")


def set_size(index: Any, size: list[int]) -> None:
    index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].size = torch.Size(size)


def empty_storage(index: Any) -> None:
    index.storage_data = None


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty index": (lambda path: (path / ".metadata").write_bytes(b""), ".metadata"),
    "index cut short": (
        lambda path: (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:99]),
        ".metadata",
    ),
    "another object": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps([1])),
        ".metadata",
    ),
    "no storage": (lambda path: edit_index(path, empty_storage), ".metadata is damaged"),
    "huge tensor": (
        lambda path: edit_index(path, lambda index: set_size(index, [LAYERS, HIDDEN, 10**12])),
        "takes more",
    ),
    "data cut short": (lambda path: os.truncate(path / "__0_0.distcp", 5000), "cut short"),
    "no data": (lambda path: (path / "__0_0.distcp").unlink(), "cut short or missing"),
    "empty common.pt": (lambda path: (path / "common.pt").write_bytes(b""), "common.pt"),
    "common.pt of text": (lambda path: (path / "common.pt").write_text("hello"), "common.pt"),
    "common.pt is a list": (lambda path: torch.save([1], path / "common.pt"), "holds a list"),
    "backend is a list": (lambda path: (path / "metadata.json").write_text("[]"), "metadata.json"),
    "backend is no JSON": (lambda path: (path / "metadata.json").write_text("{"), "metadata.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_torch_dist_checkpoint_is_refused_by_the_name_of_its_file(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = DAMAGES[damage]
    write_torch_dist(tmp_path / "input", common_file=True)
    spoil(tmp_path / "input")
    assert words in refused(capsys, tmp_path / "input")


def test_data_that_is_wrong_where_the_index_is_right_is_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_torch_dist(tmp_path / "input", common_file=True)
    data = tmp_path / "input" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert "__0_0.distcp" in refused(capsys, tmp_path / "input")


def save_number_keys(path: Path) -> None:
    torch.save({1: torch.ones(2)}, path)


def save_scalars(path: Path) -> None:
    shapes = {**cases.dense_shapes(stacked=False), "decoder.final_layernorm.weight": ()}
    del shapes["embedding.word_embeddings.weight"]
    torch.save({key: torch.ones(shape) for key, shape in shapes.items()}, path)


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "empty .pt": ("input.pt", Path.touch),
    ".pt of text": ("input.pt", lambda path: path.write_text("hello")),
    ".pt cut short": (
        "input.pt",
        lambda path: (torch.save(dense_tensors(), path), os.truncate(path, 700)),
    ),
    "keys that are numbers": ("input.pt", save_number_keys),
    "a norm without an axis": ("input.pt", save_scalars),
    "empty safetensors": ("input.safetensors", Path.touch),
    "safetensors of noise": ("input.safetensors", lambda path: path.write_bytes(b"\xff" * 99)),
    "a rank's folder without a file": (
        "input",
        lambda path: (path / "mp_rank_00").mkdir(parents=True),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_checkpoint_is_refused_by_its_name(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, write = FILES[case]
    if name.endswith(tensor_file.SUFFIX) and not tensor_file.is_available():
        pytest.skip("safetensors is not installed")
    write(tmp_path / name)
    refused(capsys, tmp_path / name)


BAD_RECORDS = {
    "a list": [1],
    "no mechanism": {"streams": 4},
    "unknown mechanism": {"mechanism": ["mhc"]},
    "nested": {**RECORD, "attnres_eps": {"a": 1}},
    "lacks a setting": {key: value for key, value in RECORD.items() if key != "attnres_eps"},
    "out of range": {**RECORD, "attnres_eps": -1.0},
    "unknown setting": {**RECORD, "novel": 1},
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_settings_record_may_hold_anything(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # settings that lacked got their defaults, whatever the model was trained with
    model = {**dense_tensors(), "decoder.residual_head.query": torch.ones(HIDDEN)}
    model["decoder.residual_settings._extra_state"] = BAD_RECORDS[case]  # type: ignore[assignment]
    torch.save(model, tmp_path / "input.pt")
    refused(capsys, tmp_path / "input.pt", "--export", target="x.safetensors")


def test_parameters_that_are_not_those_of_the_record_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # it ended in a KeyError
    parameters = cases.random_parameters(CONFIG)
    parameters["decoder.residual_head.head_bias"] = parameters.pop("decoder.residual_head.query")
    record = {"decoder.residual_settings._extra_state": RECORD}
    torch.save({**dense_tensors(), **parameters, **record}, tmp_path / "input.pt")
    words = [str(tmp_path / "input.pt"), str(tmp_path / "x.safetensors"), "--export"]
    assert main(["convert", *words]) == 2
    heading, *faults = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'input.pt'}: 2 faults:" in heading
    assert faults == [
        "  - decoder.residual_head.query is missing.",
        "  - decoder.residual_head.head_bias is not of this model (more layers?).",
    ]


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def harm_file(path: Path, harm: Harm) -> Path:
    torch.save({**dense_tensors(), "decoder.extra": harm}, path / "input.pt")
    return path / "input.pt"


def harm_legacy(path: Path, harm: Harm) -> Path:
    write_legacy(path / "input")
    file = path / "input" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "args": harm}, file)
    return path / "input"


def harm_common(path: Path, harm: Harm) -> Path:
    write_torch_dist(path / "input", common_file=True)
    torch.save({"args": harm}, path / "input" / "common.pt")
    return path / "input"


def harm_index(path: Path, harm: Harm) -> Path:
    write_torch_dist(path / "input", common_file=True)
    edit_index(path / "input", lambda index: setattr(index, "planner_data", harm))
    return path / "input"


@pytest.mark.parametrize("write", [harm_file, harm_legacy, harm_common, harm_index])
def test_code_in_a_pickle_runs_only_when_the_input_is_said_to_be_trusted(
    write: Callable[[Path, Harm], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # every pickle was loaded whole: looking at a foreign checkpoint ran what was in it
    done = tmp_path / "harm"
    source = write(tmp_path, Harm(done))
    assert "mkdir" in (line := refused(capsys, source)) and "--trust-input" in line
    assert main(["convert", str(source), str(tmp_path / "out.pt"), *BLOCKS, "--trust-input"]) == 0
    assert done.is_dir()


def test_megatrons_own_classes_are_plain_enough_where_it_is_installed(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "input", common_file=True)
    torch.save({"args": slice(1), "iteration": 7}, tmp_path / "input" / "common.pt")
    asked: list[str] = []

    def more_classes() -> tuple[type, ...]:
        asked.append("once")
        return (slice,)

    source = open_checkpoint(tmp_path / "input", Trust(more_classes=more_classes))
    assert asked == []  # importing a host takes seconds, so it is only done for files that ask
    source.write_with(tmp_path / "output", {}, RECORD, {})
    assert asked == ["once"]


def test_a_key_may_name_any_layer_and_none_is_made_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a set of all numbers below took 19 GB
    torch.save({"decoder.layers.999999999.mlp.x": torch.ones(2)}, tmp_path / "input.pt")
    tracemalloc.start()
    line = refused(capsys, tmp_path / "input.pt", *BLOCKS, "--hidden-size", "4")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "layers [0, 1, 2, 3, 4, 5, 6, 7] and 999,999,991 more have no keys" in line
    assert peak_bytes < 2**24
    with pytest.raises(ValueError, match="stacked keys of"):
        ModelShape.of({"decoder.layers.mlp.x": (10**9, 0)}, hidden_size=4)


def test_folders_of_other_libraries_come_along(tmp_path: Path) -> None:
    # a folder in an iteration's ended the copy, half done
    write_torch_dist(tmp_path / "input", common_file=True)
    (tmp_path / "input" / "modelopt_state" / "deep").mkdir(parents=True)
    (tmp_path / "input" / "modelopt_state" / "deep" / "__0_0.distcp").write_bytes(b"theirs")
    assert main(["convert", str(tmp_path / "input"), str(tmp_path / "output"), *BLOCKS]) == 0
    copied = tmp_path / "output" / "modelopt_state" / "deep" / "__0_0.distcp"
    assert copied.read_bytes() == b"theirs"


def test_an_output_inside_the_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # it was copied into itself
    write_all_iterations(tmp_path / "input")
    (tmp_path / "link").symlink_to(tmp_path / "input")
    before = listing(tmp_path)
    for target in ("input/new", "input/iter_0000007/new", "link/new", "input/x/../y"):
        assert main(["convert", str(tmp_path / "input"), str(tmp_path / target), *BLOCKS]) == 2
        assert "lies inside" in capsys.readouterr().err
    assert listing(tmp_path) == before


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does to whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """A checkpoint of the kind that the name says."""
    if path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == "":
        write_torch_dist(path, common_file=True, tensors=tensors)
    elif tensor_file.is_available():
        tensor_file.write_tensors(path, tensors, {})
    else:
        pytest.skip("safetensors is not installed")


@pytest.mark.parametrize("kind", ["", ".pt", ".safetensors"])
def test_a_disk_that_is_full_leaves_nothing_that_blocks_the_next_try(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # half an output was left, and "OUTPUT exists" was the answer from then on
    source, target = tmp_path / f"input{kind}", tmp_path / f"output{kind}"
    write(source, dense_tensors(stacked=kind == ""))
    command = ["convert", str(source), str(target), *BLOCKS]
    with files_of_at_most(1024):
        assert main(command) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and f"{target} cannot be written" in error
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    assert main(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name])


@pytest.mark.parametrize("kind", ["", ".pt", ".safetensors"])
def test_values_that_are_no_numbers_are_reported_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a checkpoint of a run that had diverged was converted, trained, and looked into much later
    source, target = tmp_path / f"input{kind}", tmp_path / f"output{kind}"
    stacked = kind == ""
    names = [
        f"decoder.layers.{'' if stacked else '1.'}mlp.linear_fc2.weight",
        "output_layer.weight",
    ]
    tensors = dense_tensors(stacked=stacked)
    tensors[names[0]].view(-1)[-1], tensors[names[1]][3, 1] = float("-inf"), float("nan")
    write(source, tensors)
    assert main(["convert", str(source), str(target), *BLOCKS]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert sorted(lines) == sorted(f"warning   NaN or infinite values: {name}" for name in names)
