# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Small launches of every kind, for the CPU host, and what their ranks keep: real and rehearsed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scripts import Order, Scripts

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
HYBRID = ROOT / "examples" / "pretrain_hybrid.py"
MORE = Path(__file__).with_name("more_models.py")
SIZES = """
    --num-layers 4 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3
    --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 96 --num-workers 0
    --no-one-logger --transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
"""
MHC = "--residual mhc --residual-mhc-sinkhorn-iterations 2"
PIPELINE = "--pipeline-model-parallel-size 2"
VIRTUAL = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
LASTING = ("weights", "gradients", "optimizer states")


@dataclass(frozen=True)
class Case:
    """Arguments besides the common ones."""

    name: str
    arguments: str
    ranks: int = 2
    script: Path = SCRIPT

    @property
    def argv(self) -> list[str]:
        """Arguments of the script."""
        sizes = SIZES if self.script != HYBRID else SIZES.replace("--num-layers 4", "")
        return [*sizes.split(), *self.arguments.split()]


CASES = (
    Case("dense", "--use-distributed-optimizer --bf16"),
    Case("mhc, group", f"{MHC} --residual-recompute group {VIRTUAL}"),
    Case("mhc, mix", f"{MHC} --residual-recompute mix --bf16 {PIPELINE}"),
    Case("blocks, none", f"--residual block_attnres --residual-block-layers 1 {VIRTUAL}"),
    Case(
        "blocks, block",
        f"--residual block_attnres --residual-block-layers 2 --residual-recompute block {VIRTUAL}",
    ),
    Case(
        "experts",
        "--residual attnres --residual-recompute mix --num-experts 4 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 40 --moe-token-dispatcher-type alltoall "
        "--expert-model-parallel-size 2 --use-distributed-optimizer",
    ),
    Case(
        "latent attention",
        "--residual hc --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 "
        f"--qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 12 {PIPELINE}",
        script=MORE,
    ),
    Case(
        "multi-token prediction",
        "--residual block_attnres --residual-block-layers 2 --mtp-num-layers 1",
        script=MORE,
    ),
    Case(
        "hybrid",
        f"{MHC} --residual-recompute group {PIPELINE} --hybrid-layer-pattern M*-|M*|-M|-*- "
        "--mamba-head-dim 24 --mamba-num-groups 2 --mamba-state-dim 16",
        script=HYBRID,
    ),
    Case(
        "tensor parallel",
        f"{MHC} --tensor-model-parallel-size 2 --sequence-parallel "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
)


def for_real(scripts: Scripts, case: Case, folder: Path) -> list[dict[str, Any]]:
    """What every rank has kept, by rank."""
    script = str(Path(__file__).with_name("for_real.py"))
    words = ["-m", "megatron_residuals.run", "--cpu-host", script, *case.argv]
    env = {"ENTRY": str(case.script)}
    run = scripts.run(Order(words, folder, ranks=case.ranks, env=env, training=True))
    lines = [line for line in run.log.splitlines() if line.startswith("for real:")]
    assert run.status == 0 and len(lines) == case.ranks, run.log[-6000:]
    found = [json.loads(line.removeprefix("for real:")) for line in lines]
    return sorted(found, key=lambda each: each["rank"])


def rehearsed(scripts: Scripts, case: Case, folder: Path, *options: str) -> list[dict[str, Any]]:
    """What a rehearsal of every rank says, by rank."""
    ranks = ",".join(map(str, range(case.ranks)))
    words = ["-m", "megatron_residuals.run", "--rehearse", str(case.ranks), "--ranks", ranks]
    words += [*options, "--json", str(case.script), *case.argv]
    run = scripts.run(Order(words, folder, training=True))
    assert run.status == 0, run.log[-6000:]
    found: list[dict[str, Any]] = json.loads(run.log.splitlines()[-1])["ranks"]
    return found


def beside_lasting(rank: dict[str, Any]) -> int:
    """Bytes at the peak that do not live through the step."""
    return sum(size for kind, size in rank["bytes"].items() if kind not in LASTING)
