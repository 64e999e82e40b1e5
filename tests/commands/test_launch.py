# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Launches behind ``--``: what the installed Megatron makes of them, and what is made of that.

All are read in one forked process, which is prepared for Megatron's training as a launch is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from megatron_residuals.cli import main
from megatron_residuals.commands.launch import Command, read_launch
from megatron_residuals.mcore.training.forecast import Forecast

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 256"
)
TALL = SMALL.replace("--num-layers 8 ", "")
BATCH, PP = "--global-batch-size 8", "--pipeline-model-parallel-size"


@pytest.fixture
def read(launch_reader: Executor) -> Any:
    """Reads a launch of a script with these arguments."""

    def read_words(arguments: str, gpus: int = 8, script: str = SCRIPT) -> Forecast:
        words = [script, *shlex.split(arguments)]
        return launch_reader.submit(read_launch, words, gpus).result()

    return read_words


def shape(found: Forecast) -> tuple[int, int, tuple[int, ...], int]:
    layout = found.plan.layout
    return layout.num_ranks, layout.num_chunks, layout.layers, found.plan.num_microbatches


def peak(found: Forecast) -> int:
    return found.prediction.worst.peak_bytes


def notes(found: Forecast) -> str:
    return "\n".join(found.remarks)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"{SMALL} {BATCH}", (1, 1, (8,), 1)),
        (SMALL, (1, 1, (8,), 1)),  # the global batch is one micro-batch for each replica
        (f"{SMALL} {BATCH} --pipeline-model-parallel-size 4", (4, 1, (2,) * 4, 4)),
        # Was passed over: one chunk on each rank was predicted for four.
        (
            f"{SMALL} {BATCH} --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 1",
            (2, 4, (1,) * 8, 2),
        ),
        (
            f"{SMALL} {BATCH} --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            (2, 2, (2,) * 4, 2),
        ),
        (
            f"{TALL} --num-layers 6 {BATCH} --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Et*2|t|t*2|tL",
            (2, 2, (2, 1, 2, 1), 2),
        ),
        (
            f"{SMALL} {BATCH} --pipeline-model-parallel-size 4 "
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
            (4, 1, (1, 3, 3, 1), 4),
        ),
        (
            f"{TALL} --num-layers 6 {BATCH} --pipeline-model-parallel-size 4 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            (4, 1, (1, 2, 2, 1), 4),
        ),
        (f"{TALL} {BATCH} {PP} 2 --hybrid-layer-pattern M*-|E|M*|E-", (2, 2, (3, 1, 2, 2), 2)),
    ],
)
def test_layers_chunks_and_micro_batches_are_the_hosts(
    read: Any, arguments: str, expected: tuple[int, int, tuple[int, ...], int]
) -> None:
    assert shape(read(arguments)) == expected


def test_the_host_says_what_it_refuses(read: Any) -> None:
    refused = {
        f"{SMALL} --num-layer-typo 8": "unrecognized arguments: --num-layer-typo 8",
        f"{SMALL} --hidden-size wide": "argument --hidden-size: invalid int value: 'wide'",
        f"{SMALL} --pipeline-model-parallel-size 3": "world size (8) is not divisible by",
        f"{SMALL} --global-batch-size 12": "global_batch_size (12) must be divisible by",
        # one rank has no virtual stages
        f"{SMALL} --num-virtual-stages-per-pipeline-rank 2": "should be greater than 1",
        # an assertion of the host's without a message
        SMALL.replace("--micro-batch-size 1", ""): "assert args.micro_batch_size is not None (line",
        # what the host finds only when it makes its configuration, and when it builds a stage
        f"{SMALL} --num-query-groups 3 --group-query-attention --tensor-model-parallel-size 2": "3",
        f"{TALL} --num-layers 9 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2": "ivisible",
    }
    for arguments, words in refused.items():
        with pytest.raises(ValueError, match="Megatron refuses this launch: ") as error:
            read(arguments)
        assert words in str(error.value) and "\n" not in str(error.value), arguments


def test_a_batch_that_grows_is_predicted_where_it_is_largest(read: Any) -> None:
    arguments = read(SMALL).heading  # names the host
    if "Megatron-Core 0.17" in arguments:
        found = read(f"{SMALL} --rampup-batch-size 8 8 100 --global-batch-size 24")
        assert shape(found)[3] == 3 and "1, 2, 3 micro-batches; predicted for 3" in notes(found)
        return
    found = read(f"{SMALL} --step-batch-size-schedule '0:8 1K:32 2K:16'")
    assert shape(found)[3] == 4 and "1, 4, 2 micro-batches; predicted for 4" in notes(found)
    # Both were predicted from the global batch alone, and the launch could not start.
    with pytest.raises(ValueError, match="Cannot specify both --step-batch-size-schedule"):
        read(f"{SMALL} {BATCH} --step-batch-size-schedule '0:8 1K:32'")
    with pytest.raises(ValueError, match=r"current global batch size \(4\) is not divisible"):
        read(f"{SMALL} --step-batch-size-schedule '0:4 1K:32'")
    ends = read(f"{SMALL} --step-batch-size-schedule '0:8 32K:12'")
    assert "this launch ends after 1000 samples" in notes(ends)  # of 32 tokens each
    ignored = read(f"{SMALL} {BATCH} --rampup-batch-size 8 8 100")
    assert "ignores --rampup-batch-size" in notes(ignored)


@pytest.mark.parametrize("way", ["--residual mhc", "--spec megatron_residuals.specs mhc"])
def test_a_mechanism_is_asked_for_by_flag_or_by_spec(read: Any, way: str) -> None:
    # The second way was read as the plain model.
    found = read(f"{SMALL} {way} --residual-streams 2 --residual-recompute mix")
    assert not found.stock and str(found.plan.residual) == "mhc(streams=2, recompute='mix')"
    assert found.prediction.policy == "mix"
    assert read(SMALL).stock


def test_our_own_refusals_come_before_or_from_the_same_table_as_in_a_run(read: Any) -> None:
    refused = {
        "--residual mhc --residual-recompute block": "recompute is 'block'",
        "--residual mhc --residual-stream 2": "did you mean --residual-streams?",
        "--residual mhc --spec megatron_residuals.specs hc": "--spec asks for 'hc'",
        "--residual mhc --cuda-graph-impl local": "CUDA graphs are not supported",
        "--residual mhc --use-torch-fsdp2 --untie-embeddings-and-output-weights "
        "--ckpt-format torch_dcp --no-gradient-accumulation-fusion": "cannot be sharded by layer",
        "--residual mhc --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --residual-recompute mix": "both would replay the same layers",
    }
    for arguments, words in refused.items():
        with pytest.raises(ValueError, match=".") as error:
            read(f"{SMALL} {arguments}")
        assert words in str(error.value), arguments
    for residual in ("", "--residual mhc"):
        wide = read(f"{SMALL} {residual} --fp32-residual-connection --bf16")
        assert "not taken into account: fp32_residual_connection = True" in notes(wide)


def test_a_hybrid_launch_is_predicted_layer_by_layer(read: Any) -> None:
    def kept(pattern: str) -> int:
        found = read(f"{TALL} --num-experts 4 --moe-router-topk 2 --hybrid-layer-pattern {pattern}")
        return found.plan.predict().ranks[0].kept_parts["attention_and_mlp"]

    assert kept("M*-E") + kept("*") == kept("M*") + kept("*-E")
    assert kept("*E") - kept("*") == 2 * (kept("*-") - kept("*"))  # two experts for each token


def test_every_size_that_is_counted_changes_the_answer(read: Any) -> None:
    # Most of these changed nothing, and no note said so.
    plain = peak(read(SMALL))
    experts = "--num-experts 8 --moe-ffn-hidden-size 96"
    for arguments in (
        "--kv-channels 64",
        "--group-query-attention --num-query-groups 1",
        "--qk-layernorm",
        "--multi-latent-attention --kv-lora-rank 64",
        "--swiglu",
        "--attention-backend unfused",
        "--seq-length 16",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--transformer-impl local",
        experts,
    ):
        assert peak(read(f"{SMALL} {arguments}")) != plain, arguments
    found = [
        peak(read(f"{SMALL} {experts} {more}"))
        for more in ("", "--moe-router-topk 4", "--moe-shared-expert-intermediate-size 64")
    ]
    assert found[0] < found[2] < found[1]


def test_the_number_of_micro_batches_in_a_group_counts(read: Any) -> None:
    # 18.0 GiB were predicted for 24.5 of another launch.
    layout = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4"
    few = read(f"{SMALL} --global-batch-size 64 {layout}")
    groups = f"{layout} --microbatch-group-size-per-virtual-pipeline-stage 8"
    many = read(f"{SMALL} --global-batch-size 64 {groups}")
    assert (few.plan.group_size, many.plan.group_size) == (2, 8)
    assert peak(many) > peak(few)


def test_defaults_are_the_hosts(read: Any) -> None:
    # Layers were taken for local ones unless the command named Transformer Engine; experts
    # without a width or a top-k of their own were a crash.
    assert "as fused layers with flash attention" in notes(read(SMALL))
    sizes = read(f"{SMALL} --num-experts 8").plan.sizes
    assert sizes.ffn_hidden_size == 2 * 4 * 64
    words = SMALL.replace("--vocab-size 256", "--vocab-size 260")
    local = read(f"{words} --transformer-impl local").plan.sizes
    assert local.host_layer_bytes is None and local.vocab_size == 384  # padded


def test_what_is_left_out_is_named(read: Any) -> None:
    words = {
        "--mtp-num-layers 1 --position-embedding-type rope": "mtp_num_layers = 1",
        "--hidden-dropout 0.1": "hidden_dropout = 0.1",
        "--num-experts 8 --moe-layer-freq [0]*2+[1]*6": "every layer is counted as the wider kind",
        "--num-experts 8": "dispatched tokens and the router are not counted",
        "--recompute-granularity selective": "recompute_modules = ['core_attn']",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2": "'block'",
        "--transformer-impl local --attention-dropout 0.1": "attention_dropout = 0.1",
        "--transformer-impl local --qk-layernorm": "qk_layernorm = True",
        "--freeze-all-layers": "freeze_all_layers = True",
    }
    for arguments, named in words.items():
        assert named in notes(read(f"{SMALL} {arguments}")), arguments
    assert "not taken into account" not in notes(read(SMALL))


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


OWN_PARSER = """\
from megatron.training.initialize import initialize_megatron
def add(parser):
    parser.add_argument("--teacher-layers", type=int)
    return parser
defaults = {"micro_batch_size": 2}
try:
    from megatron.training.arguments import parse_and_validate_args
    parse_and_validate_args(add, args_defaults=defaults)
except ImportError:
    initialize_megatron(add, args_defaults=defaults, allow_no_cuda=True)
raise RuntimeError("the script went on behind its arguments")
"""


def test_options_and_defaults_of_the_script_are_read_with_it(read: Any, tmp_path: Path) -> None:
    script = write(tmp_path, OWN_PARSER)
    arguments = SMALL.replace("--micro-batch-size 1", "--global-batch-size 32")
    found = read(f"{arguments} --teacher-layers 4", script=script)
    assert found.plan.sizes.micro_batch_size == 2 and shape(found)[3] == 2
    assert "the script's own options, not taken into account: --teacher-layers" in notes(found)
    with pytest.raises(ValueError, match="unrecognized arguments: --pupil-layers 4"):
        read(f"{arguments} --pupil-layers 4", script=script)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (None, "there is no file"),
        ("import a_package_of_the_cluster\n", "cannot be run here (ModuleNotFoundError: No module"),
        ("print('done')\n", "has ended without asking Megatron for its arguments"),
    ],
)
def test_where_the_script_does_not_come_to_its_arguments_the_host_reads_them_alone(
    read: Any, tmp_path: Path, text: str | None, note: str
) -> None:
    script = str(tmp_path / "absent.py") if text is None else write(tmp_path, text)
    found = read(f"{SMALL} --teacher-layers 4", script=script)
    assert shape(found)[2] == (8,)
    assert note in notes(found) and "Megatron's parser alone" in notes(found)
    assert "options that this Megatron does not know: --teacher-layers" in notes(found)


def test_arguments_that_a_checkpoint_would_give_are_pointed_out(read: Any, tmp_path: Path) -> None:
    words = f"--use-checkpoint-args --load {tmp_path}"
    found = read(f"{SMALL} {words}")
    assert "takes arguments from a checkpoint that is not here" in notes(found)
    with pytest.raises(ValueError, match="is not None .*a checkpoint that is not here"):
        read(f"{SMALL.replace('--micro-batch-size 1', '')} {words}")


def surroundings_of(words: list[str]) -> bool:
    """Whether reading a launch leaves the process as it was."""
    from megatron.training import global_vars

    def seen() -> tuple[object, ...]:
        return dict(os.environ), list(sys.argv), list(sys.path), global_vars._GLOBAL_ARGS

    read_launch(words, 8)  # prepares the process
    before = seen()
    read_launch(words, 8)
    with contextlib.suppress(ValueError):
        read_launch([*words, "--wrong"], 8)
    return before == seen()


def test_a_reading_leaves_no_trace(launch_reader: Executor) -> None:
    words = [SCRIPT, *shlex.split(SMALL)]
    assert launch_reader.submit(surroundings_of, words).result()


def run_cli(command: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(shlex.split(command))
    return status, out.getvalue(), err.getvalue()


PIPELINE = f"{SMALL} {BATCH} --pipeline-model-parallel-size 2 --residual block_attnres"


def test_every_command_takes_a_launch(launch_reader: Executor) -> None:
    launch = f"-- torchrun --nproc_per_node 4 --nnodes 2 {SCRIPT} {PIPELINE}"

    def run(command: str) -> tuple[int, str, str]:
        return launch_reader.submit(run_cli, f"{command} {launch}").result()

    for command, words in {
        "plan": "8 layers, blocks of 2 sublayers",
        "memory": "8 layers, block_attnres(), P=2, V=1, 2 micro-batch(es)",
        "simulate --gpu b200": "8 layers, P=2, V=1 (1F1B), 2 micro-batches",
    }.items():
        status, out, err = run(command)
        assert (status, err) == (0, "")
        assert out.startswith("8 GPU(s), 4 replica(s) of TP 1 x PP 2, as Megatron-Core")
        assert words in out and "note: attention and MLP are estimated" in out
        fields = json.loads(run(f"{command} --json")[1])
        assert fields["launch"].startswith("8 GPU(s)") and fields["notes"]
    status, out, _ = launch_reader.submit(
        run_cli, f"memory --host-layer-bytes 1000 {launch}"
    ).result()
    assert "note: attention" not in out and "this launch: none, " in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"memory --layers 8 --gpus 8 -- {SCRIPT} {SMALL}", "--layers: not beside a launch"),
        (f"simulate --vpp 2 --gpus 8 -- {SCRIPT} {SMALL}", "--vpp: not beside a launch"),
        (f"plan -- {SCRIPT} {SMALL}", "--gpus is None; give the number of GPUs of all nodes"),
        ("memory --gpus 8 -- bash train.sh", "there is no Python script in: bash train.sh"),
        ("memory --gpus 8 --residual mhc --layers 8", "--gpus is of a launch"),
        ("doctor -- train.py", "this command takes nothing behind --"),
    ],
)
def test_a_wrong_call_says_what_to_do(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert main(shlex.split(command)) == 2
    assert message in capsys.readouterr().err


def test_a_command_is_split_at_its_script() -> None:
    runner = "torchrun --nproc-per-node=8 --nnodes 4 -m megatron_residuals.run --cpu-host"
    for front, gpus, for_gpus in (
        ("torchrun --nproc_per_node 8 --nnodes 2", 16, True),
        ("python -m torch.distributed.run --nnodes 2:4 --nproc_per_node gpu", None, True),
        ("ft_launcher --ft-cfg-path x.yaml --nproc_per_node 4", 4, True),
        (runner, 32, False),
        ("", None, True),
    ):
        found = Command.parse([*front.split(), "dir/train.py", "--lr", "1", "x.py"])
        assert found == Command(Path("dir/train.py"), ("--lr", "1", "x.py"), gpus, for_gpus)
    assert Command.parse([*runner.split(), "train", "--lr"]).script == Path("train")
    assert not Command.parse("train.py --distributed-backend gloo".split()).for_gpus


def test_without_megatron_the_command_says_what_else_there_is() -> None:
    import subprocess

    script = (
        "import sys\n"
        "sys.modules.update(torch=None, megatron=None)\n"
        "from megatron_residuals.cli import main\n"
        "sys.exit(main(['memory', '--gpus', '8', '--', 'train.py']))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "Install megatron-core of at least 0.17" in done.stderr
