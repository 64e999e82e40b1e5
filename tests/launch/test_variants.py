# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""The launch variants: what each starts, presets, restarts in one wandb run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
PRESETS = sorted(path.stem for path in (LAUNCH / "presets").glob("*.env"))


def launch(
    script: str, *arguments: str, cwd: Path = ROOT, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with a clean environment; `path` is searched for commands first."""
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    kept["PATH"] = os.pathsep.join([*([str(path)] if path else []), "/usr/bin", "/bin"])
    return subprocess.run(
        [script if "/" in script else str(LAUNCH / script), *arguments],
        env=kept | {"PYTHON": sys.executable} | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def dry_run(script: str, *arguments: str, **variables: str) -> list[list[str]]:
    """The commands that a script would start, without predictions, in words."""
    result = launch(script, *arguments, DRY_RUN="1", **{"PREDICT": "0", **variables})
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


def option(words: list[str], name: str) -> str:
    assert words.count(name) == 1, f"{name} occurs {words.count(name)} times in {words}"
    return words[words.index(name) + 1]


def write_command(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def test_nodes_meet_at_a_c10d_rendezvous_and_restart_together() -> None:
    (words,) = dry_run("multi_node.sh", MASTER_ADDR="node0", NUM_NODES="4", RDZV_ID="42")
    assert option(words, "--rdzv_backend") == "c10d"
    assert option(words, "--rdzv_endpoint") == "node0:29400"
    assert option(words, "--rdzv_id") == "42"
    assert [option(words, f"--{name}") for name in ("nnodes", "max_restarts")] == ["4", "3"]
    assert not {"--node_rank", "--master_addr", "--standalone"} & set(words)


def test_a_static_rendezvous_numbers_the_nodes() -> None:
    (words,) = dry_run(
        "multi_node.sh", MASTER_ADDR="node0", RDZV="static", NODE_RANK="1", MAX_RESTARTS="0"
    )
    assert [option(words, f"--{name}") for name in ("nnodes", "node_rank")] == ["2", "1"]
    assert option(words, "--master_addr") == "node0"
    assert not {"--rdzv_backend", "--max_restarts"} & set(words)


def test_the_fault_tolerant_launcher_takes_torchruns_place() -> None:
    (words,) = dry_run("fault_tolerant.sh", MASTER_ADDR="node0", NUM_NODES="2", RESIDUAL="mhc")
    assert words[0] == "ft_launcher"
    assert words[words.index("-m") + 1] == "megatron_residuals.run"
    assert any(word.startswith("--ft-rank-section-timeouts=setup:") for word in words)
    assert option(words, "--max_restarts") == "3"
    assert "--enable-ft-package" in words
    (words,) = dry_run("fault_tolerant.sh", FT_OPTIONS="--ft-cfg-path /ft.yaml")
    assert option(words, "--ft-cfg-path") == "/ft.yaml"
    assert not any("timeout" in word for word in words)


def test_the_fault_tolerant_launcher_runs_where_it_is_installed_and_is_asked_for_elsewhere(
    tmp_path: Path,
) -> None:
    result = launch("fault_tolerant.sh", RUN_DIR=str(tmp_path / "run"))
    assert result.returncode == 2
    assert "ft_launcher is not installed; pip install nvidia-resiliency-ext" in result.stderr
    write_command(tmp_path / "bin", "ft_launcher", 'echo "started with $#"')
    result = launch("fault_tolerant.sh", path=tmp_path / "bin", RUN_DIR=str(tmp_path / "run"))
    assert result.returncode == 0 and result.stdout.startswith("started with ")


@pytest.mark.parametrize("script", ["pretrain.sh", "multi_node.sh", "slurm.sh"])
def test_a_rehearsal_is_of_all_ranks_and_starts_no_launcher(script: str, tmp_path: Path) -> None:
    write_command(tmp_path, "python", 'printf "%q " "$@"')
    options = {"REHEARSE": "1", "REHEARSE_OPTIONS": "--budget-gib 80", "PYTHON": "python"}
    variables = {"NUM_NODES": "4", "MASTER_ADDR": "a", "RESIDUAL": "mhc", **options}
    found = launch(script, "--", "--lr", "1", path=tmp_path, **variables)
    assert found.returncode == 0, found.stderr
    words = shlex.split(found.stdout)
    assert words[:6] == ["-m", "megatron_residuals.run", "--rehearse", "32", "--budget-gib", "80"]
    assert words[6] == str(ROOT / "examples" / "pretrain_gpt.py")
    assert words[-4:] == ["--residual", "mhc", "--lr", "1"]


def test_a_slurm_job_starts_one_launcher_per_node_in_a_container_if_asked() -> None:
    step, words = dry_run(
        "slurm.sh", "--", "--lr", "1 2", NUM_NODES="4", CONTAINER_IMAGE="/i.sqsh", SRUN_OPTIONS="-l"
    )
    assert step[0] == "srun" and option(step, "--nodes") == "4" and "-l" in step
    assert option(step, "--ntasks-per-node") == "1"
    assert option(step, "--container-image") == "/i.sqsh"
    assert step[-2:] == words[-2:] == ["--lr", "1 2"]
    assert option(words, "--nnodes") == "4"
    step, words = dry_run("slurm.sh", SCRIPT="fault_tolerant.sh")
    assert words[0] == "ft_launcher" and "--container-image" not in step


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_a_node_of_a_slurm_job_knows_the_first_one_and_its_own_number(
    tmp_path: Path, rendezvous: str
) -> None:
    write_command(tmp_path / "bin", "scontrol", "[[ $3 == 'n[7-9]' ]] && printf '%s\\n' n7 n8 n9")
    write_command(
        tmp_path / "bin",
        "srun",
        'while [[ $1 != bash ]]; do shift; done; DRY_RUN=1 SLURM_NODEID=2 exec "$@"',
    )
    copy = tmp_path / "spool" / "slurm_script"  # SLURM runs a copy from a folder of its own
    copy.parent.mkdir()
    copy.write_bytes((LAUNCH / "slurm.sh").read_bytes())
    copy.chmod(0o755)
    result = launch(
        str(copy),
        path=tmp_path / "bin",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="77",
        SLURM_JOB_NUM_NODES="3",
        SLURM_JOB_NODELIST="n[7-9]",
        RDZV=rendezvous,
        PREDICT="0",
    )
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    if rendezvous == "c10d":
        assert option(words, "--rdzv_endpoint") == "n7:29400"
        assert option(words, "--rdzv_id") == "77"
    else:
        assert option(words, "--master_addr") == "n7"
        assert option(words, "--node_rank") == "2"


def test_options_of_srun_may_stand_on_several_lines() -> None:
    step, _ = dry_run("slurm.sh", SRUN_OPTIONS="--label\n--cpus-per-task 8")
    assert "--label" in step and option(step, "--cpus-per-task") == "8"


@pytest.mark.parametrize("script", ["multi_node", "slurm", "fault_tolerant", "cpu", "demo"])
def test_no_launcher_runs_a_command_that_stands_in_a_number(script: str, tmp_path: Path) -> None:
    attack = f"BASH_VERSINFO[$(touch {tmp_path / 'trace'})0]"
    variables = {"MASTER_ADDR": "node0", "DRY_RUN": "1", "OUT": str(tmp_path / "out")}
    for name in ("NUM_NODES", "TRAIN_ITERS", "MAX_RESTARTS"):
        result = launch(f"{script}.sh", **{**variables, name: attack})
        assert result.returncode == 2
        assert f"{name} is 'BASH_VERSINFO[" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_small_model_on_the_cpu_needs_no_variable() -> None:
    (words,) = dry_run("cpu.sh", RESIDUAL="mhc")
    assert words[words.index("megatron_residuals.run") + 1] == "--cpu-host"
    assert option(words, "--num-layers") == "4"
    (words,) = dry_run("cpu.sh", NUM_LAYERS="8", PP="4", GPUS_PER_NODE="4")
    assert option(words, "--num-layers") == "8"


def test_presets_give_way_to_the_environment_and_are_listed_where_one_is_unknown() -> None:
    (words,) = dry_run("pretrain.sh", PRESET="moe", NUM_EXPERTS="16", NUM_LAYERS="12")
    assert [option(words, f"--{name}") for name in ("num-experts", "num-layers")] == ["16", "12"]
    assert option(words, "--moe-router-topk") == "6"
    (words,) = dry_run("multi_node.sh", PRESET="v4_layout", MASTER_ADDR="node0")
    assert option(words, "--nnodes") == "8" and option(words, "--residual") == "mhc"
    result = launch("pretrain.sh", PRESET="k9")
    assert result.returncode == 2
    assert f"there is no preset 'k9' ({LAUNCH}/presets/k9.env)" in result.stderr
    assert all(name in result.stderr for name in PRESETS)


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        ("multi_node.sh", {}, "MASTER_ADDR is not set"),
        ("multi_node.sh", {"MASTER_ADDR": "a", "RDZV": "static"}, "NODE_RANK is not set"),
        ("pretrain.sh", {"RDZV": "etcd"}, "RDZV is 'etcd'; allowed: static, c10d"),
        ("pretrain.sh", {"LAUNCHER": "mpi"}, "allowed: torchrun, ft_launcher"),
        ("slurm.sh", {}, "this is no SLURM job; submit it with sbatch"),
        ("slurm.sh", {"SCRIPT": "demo.sh"}, "allowed: multi_node.sh, fault_tolerant.sh"),
        ("slurm.sh", {"REPOSITORY": "/nowhere"}, "/nowhere is not the repository"),
    ],
)
def test_a_wrong_call_says_what_to_do(script: str, variables: dict[str, str], message: str) -> None:
    result = launch(script, **variables)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["multi_node", "fault_tolerant", "cpu", "slurm"])
def test_help_is_the_head_of_each_script(name: str) -> None:
    result = launch(f"{name}.sh", "--help")
    assert result.returncode == 0
    assert f"launch/{name}.sh" in result.stdout and "set -euo" not in result.stdout
    assert "SBATCH" not in result.stdout


def wandb_ids(folder: Path, times: int, **variables: str) -> list[str]:
    """WANDB_RUN_ID and WANDB_RESUME of launches that follow each other in one run directory."""
    write_command(folder / "bin", "python", 'echo "$WANDB_RUN_ID $WANDB_RESUME"')
    found = []
    for _ in range(times):
        result = launch(
            "pretrain.sh",
            PYTHON=str(folder / "bin" / "python"),
            RUN_DIR=str(folder / "run"),
            WANDB_PROJECT="p",
            **variables,
        )
        assert result.returncode == 0, result.stderr
        run_id, resume = result.stdout.split()
        assert resume == "allow"
        found.append(run_id)
    return found


def test_launches_with_checkpoints_go_on_in_one_wandb_run(tmp_path: Path) -> None:
    first, second = wandb_ids(tmp_path, 2, CHECKPOINT_PATH="/ckpt")
    assert first == second == (tmp_path / "run" / "wandb_run_id").read_text().strip()
    assert first.isalnum() and len(first) == 12
    (given,) = wandb_ids(tmp_path, 1, CHECKPOINT_PATH="/ckpt", WANDB_RUN_ID="mine")
    assert [given, *wandb_ids(tmp_path, 1, CHECKPOINT_PATH="/ckpt")] == ["mine", "mine"]


def test_two_runs_share_neither_logs_nor_their_wandb_run_unless_told_to(tmp_path: Path) -> None:
    # By default both had the same folder: the second went on in the first one's wandb run.
    write_command(
        tmp_path / "bin", "python", 'echo "$WANDB_RUN_ID $MEGATRON_RESIDUALS_LOG_DIR"; echo "$@"'
    )
    found = []
    for name in ("plain", "mhc"):
        result = launch(
            "pretrain.sh",
            PYTHON=str(tmp_path / "bin" / "python"),
            WANDB_PROJECT="p",
            CHECKPOINT_PATH=str(tmp_path / name),
        )
        run_id, folder, *words = shlex.split(result.stdout)
        assert folder == str(tmp_path / name)
        assert option(words, "--tensorboard-dir") == f"{folder}/tensorboard"
        found.append(run_id)
    assert found[0] != found[1]


def test_without_checkpoints_logs_go_to_a_folder_named_after_the_run() -> None:
    for variables in ({}, {"CHECKPOINT_PATH": "msc://bucket/run"}):
        (words,) = dry_run("pretrain.sh", RESIDUAL="mhc", **variables)
        assert option(words, "--tensorboard-dir").endswith("/runs/mhc/tensorboard")
    job = {"SLURM_JOB_NAME": "a", "SLURM_JOB_ID": "7"}
    _, words = dry_run("slurm.sh", **job)
    assert option(words, "--tensorboard-dir") == f"{ROOT}/runs/a-7/tensorboard"


def test_launches_that_start_anew_get_a_wandb_run_each(tmp_path: Path) -> None:
    assert len(set(wandb_ids(tmp_path, 3))) == 3
    restarted = wandb_ids(tmp_path, 2, MAX_RESTARTS="1")
    assert restarted[0] == restarted[1]


def test_restarts_without_checkpoints_are_pointed_out(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python", "true")
    python, run_dir = str(tmp_path / "bin" / "python"), str(tmp_path / "run")
    result = launch("pretrain.sh", PYTHON=python, RUN_DIR=run_dir, MAX_RESTARTS="2")
    assert "a restart begins at iteration 0, since CHECKPOINT_PATH is not set" in result.stderr
    assert not (tmp_path / "run" / "wandb_run_id").exists()
