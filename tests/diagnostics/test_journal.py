# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON lines file: written, appended to after a restart, read back; and named figures."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_residuals.config import MECHANISMS
from megatron_residuals.diagnostics import journal
from megatron_residuals.diagnostics.catalogue import metrics_of
from megatron_residuals.diagnostics.metric import place_name, summarise
from megatron_residuals.diagnostics.records import Record, scalars_of
from megatron_residuals.pipeline.layout import gpt_places, places_of

ROOT = Path(__file__).resolve().parents[2]
HEADER = {"config": "mhc(streams=2)", "settings": {"mechanism": "mhc"}, "num_layers": 2}


def record(iteration: int, scale: float = 1.0) -> Record:
    return Record(
        iteration,
        series={"residual/output_rms": [scale, 2.0, math.nan, 0.1 + 0.2]},
        matrices={"mhc/read_weights": [[0.5, math.nan]] * 4},
        losses={iteration - 1: {"lm loss": 3.0}, iteration: {"lm loss": math.nan}},
        figures={"learning-rate": 1e-3},
    )


def write(folder: Path, *records: Record) -> journal.JournalWriter:
    writer = journal.JournalWriter(folder)
    writer.write("start", HEADER)
    for each in records:
        writer.write("step", dataclasses.asdict(each))
    return writer


def test_what_is_written_is_read_back_nan_included(tmp_path: Path) -> None:
    write(tmp_path / "new", record(4))
    run = journal.read(tmp_path / "new")
    assert (run.mechanism, len(run.places), list(run.steps)) == ("mhc", 4, [4])
    first, second, third, fourth = run.last("residual/output_rms")
    assert (first, second) == (1, 2) and math.isnan(third) and fourth == pytest.approx(0.3)
    assert math.isnan(run.last("mhc/read_weights")[3][1])
    assert run.losses["lm loss"][3] == 3 and math.isnan(run.losses["lm loss"][4])
    assert "NaN" not in run.path.read_text()  # which is no JSON


def test_bytes_are_kept_to_the_last_one(tmp_path: Path) -> None:
    sent = [float(2**40 + 1)]
    write(tmp_path, Record(1, series={"residual/bytes_forward": sent}))
    assert journal.read(tmp_path).last("residual/bytes_forward") == sent


def test_after_a_restart_the_later_start_and_the_later_step_count(tmp_path: Path) -> None:
    write(tmp_path, record(2), record(4))
    writer = write(tmp_path, record(4, scale=7.0), record(6))
    with writer.path.open("a") as file:
        file.write('{"kind":"step","iteration":8,"ser')  # killed while writing
    run = journal.read(tmp_path)
    assert list(run.steps) == [2, 4, 6]
    assert run.over_time("residual/output_rms")[4][0] == 7


def test_what_lay_ahead_of_a_restart_or_belongs_to_a_run_before_is_left_out(tmp_path: Path) -> None:
    # Another mechanism tried in the same folder was drawn with the tail of the longer run before.
    write(tmp_path, *map(record, (1, 10, 20, 30)))
    write(tmp_path, record(16), record(20, scale=7.0))  # from the checkpoint of iteration 15
    resumed = journal.read(tmp_path)
    assert list(resumed.steps) == [1, 10, 16, 20]
    assert resumed.over_time("residual/output_rms")[20][0] == 7
    assert list(resumed.losses["lm loss"]) == [0, 1, 9, 10, 15, 16, 19, 20]
    write(tmp_path, record(1, scale=9.0))
    anew = journal.read(tmp_path)
    assert (list(anew.steps), list(anew.losses["lm loss"])) == ([1], [0, 1])


def test_a_run_is_found_by_its_file_its_folder_or_a_folder_above(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "b", record(1)).path
    for given in (path, path.parent, tmp_path):
        assert journal.find(given) == path
    write(tmp_path / "c", record(1))
    with pytest.raises(ValueError, match="several runs: .*b, .*c; name one"):
        journal.find(tmp_path)
    with pytest.raises(ValueError, match="--residual-log-interval"):
        journal.find(tmp_path / "nowhere")


def test_a_file_without_a_start_is_refused(tmp_path: Path) -> None:
    journal.JournalWriter(tmp_path).write("step", dataclasses.asdict(record(1)))
    with pytest.raises(ValueError, match="no line that describes the run"):
        journal.read(tmp_path)


STEP = {
    "kind": "step",
    "iteration": 2,
    "series": {"residual/output_rms": [1.0, None]},
    "matrices": {"mhc/read_weights": [[0.5, 0.5], [1, 0]]},
    "losses": {"2": {"lm loss": 3.0}},
}
START = {"kind": "start", **HEADER}
DAMAGED: list[object] = [
    [STEP],
    {"kind": "step"},
    {"kind": ["step"]},
    {**STEP, "iteration": "2"},
    {**STEP, "iteration": 10**400},
    {**STEP, "series": [1.0]},
    {**STEP, "series": {"residual/output_rms": []}},
    {**STEP, "series": {"residual/output_rms": ["1"]}},
    {**STEP, "series": {"residual/output_rms": [10**400]}},
    {**STEP, "matrices": {"mhc/read_weights": [[1.0], [1.0, 2.0]]}},
    {**STEP, "matrices": {"mhc/read_weights": []}},
    {**STEP, "losses": {"two": {"lm loss": 3.0}}},
    {**STEP, "losses": {"2": 3.0}},
    {name: value for name, value in STEP.items() if name != "matrices"},
    {"kind": "start"},
    {**START, "settings": None},
    {**START, "settings": {"mechanism": "unheard of"}},
    {**START, "num_layers": None},
    {**START, "config": 7},
    {**START, "pipeline": 7},
]


def test_lines_that_are_damaged_are_skipped_and_counted(tmp_path: Path) -> None:
    # each of them ended the report in a traceback, wherever in the file it was
    whole = [json.dumps(line).encode() for line in (START, STEP)]
    damaged = [json.dumps(line).encode() for line in DAMAGED]
    damaged += [b"\xff\xfe", whole[1][:40], b"[" * 100_000, b'{"kind":' * 5000]
    (tmp_path / journal.FILE_NAME).write_bytes(
        b"\n".join([*damaged, whole[0], b"", *damaged, whole[1]])
    )
    run = journal.read(tmp_path)
    assert run.skipped == 2 * len(damaged)
    assert (list(run.steps), run.losses) == ([2], {"lm loss": {2: 3.0}})
    assert run.last("mhc/read_weights") == [[0.5, 0.5], [1.0, 0.0]]


def test_numbers_that_no_axis_holds_are_drawn_as_gaps(tmp_path: Path) -> None:
    text = json.dumps({**STEP, "series": {"residual/output_rms": [1.0, "INF"]}})
    lines = [json.dumps(START), text.replace('"INF"', "1e999")]
    (tmp_path / journal.FILE_NAME).write_text("\n".join(lines))
    run = journal.read(tmp_path)
    assert run.skipped == 0 and math.isnan(run.last("residual/output_rms")[1])


def test_text_of_a_header_steers_no_terminal(tmp_path: Path) -> None:
    header = {**START, "config": "mhc\x1b[2J\ud800", "plan": "a\nb"}
    (tmp_path / journal.FILE_NAME).write_text(json.dumps(header))
    run = journal.read(tmp_path)
    assert (run.header["config"], run.header["plan"]) == ("mhc\ufffd[2J\ufffd", "a\nb")


def test_scalars_have_a_summary_and_global_places_and_only_numbers() -> None:
    scalars = scalars_of(record(4), "mhc", gpt_places(2))
    assert scalars == {
        "residual/output_rms_max": 2.0,
        "residual_detail/output_rms_layer_0_attention": 1.0,
        "residual_detail/output_rms_layer_0_mlp": 2.0,
        "residual_detail/output_rms_layer_1_mlp": 0.1 + 0.2,
    }


def test_places_are_named_by_what_they_are() -> None:
    assert place_name("reader", 7, gpt_places(4)) == "layer_3_mlp"
    assert place_name("reader", 8, gpt_places(4)) == "output"
    hybrid = places_of([["mamba"], ["moe"]])
    assert [place_name("sublayer", i, hybrid) for i in (0, 1)] == ["layer_0_mamba", "layer_1_moe"]
    assert place_name("hop", 2, gpt_places(4)) == "hop_2"


@pytest.mark.parametrize(
    ("how", "expected"), [("max", 3.0), ("min", -1.0), ("mean", 1.0), ("sum", 2.0)]
)
def test_summaries_leave_out_what_is_not_a_number(how: str, expected: float) -> None:
    assert summarise([3.0, math.nan, -1.0], how) == expected  # type: ignore[arg-type]
    assert math.isnan(summarise([math.nan], how))  # type: ignore[arg-type]


def test_every_metric_with_a_range_says_what_to_do_outside_it() -> None:
    everyone = {metric for name in MECHANISMS for metric in metrics_of(name).values()}
    for metric in everyone:
        assert metric.meaning
        if metric.low is not None or metric.high is not None:
            assert metric.advice, metric.name
            assert not metric.is_healthy(math.nan)
    names = [list(metrics_of(mechanism)) for mechanism in MECHANISMS]
    assert all(len(set(of_one)) == len(of_one) for of_one in names)


def test_reading_a_run_takes_neither_torch_nor_megatron() -> None:
    script = (
        "import sys; from megatron_residuals.diagnostics import journal, page\n"
        "print(sorted({'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
