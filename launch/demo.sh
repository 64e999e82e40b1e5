#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# Train the same small GPT three times on real text, each time with another residual connection, and
# draw the report. Two CPU ranks, PP=2 with two virtual stages each. Called by `make demo`.
#
#   launch/demo.sh            about seven minutes on two cores
#   QUICK=1 launch/demo.sh    less than two
#
# Every ${NAME:-default} below is a variable to set; so are those of launch/pretrain.sh.
set -euo pipefail
export LC_ALL=C

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
check_values
cd "$ROOT"
PYTHON=${PYTHON:-python}
OUT=${OUT:-runs/demo}
DATA=${DATA:-runs/data/stdlib}
QUICK=${QUICK:-}

# Small enough for two cores, deep enough that the residual matters: 16 sublayers, 4 blocks of 2
# layers, one per stage. A width of 96 wants a larger initialisation than the usual 0.02.
export DEVICE=cpu GPUS_PER_NODE=2 TP=1 PP=2 VPP=2
export NUM_LAYERS=${NUM_LAYERS:-8} HIDDEN_SIZE=${HIDDEN_SIZE:-96} FFN_HIDDEN_SIZE=${FFN_HIDDEN_SIZE:-256}
export NUM_ATTENTION_HEADS=${NUM_ATTENTION_HEADS:-4} SEQ_LENGTH=${SEQ_LENGTH:-128} INIT_STD=${INIT_STD:-0.06}
export MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-4} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-8}
export LR=${LR:-4e-3} MIN_LR=${MIN_LR:-4e-4} SEED=${SEED:-1234}
if [[ -n $QUICK && $QUICK != 0 ]]; then
  export TRAIN_ITERS=${TRAIN_ITERS:-30} EVAL_INTERVAL=${EVAL_INTERVAL:-12} EVAL_ITERS=${EVAL_ITERS:-4}
else
  export TRAIN_ITERS=${TRAIN_ITERS:-140} EVAL_INTERVAL=${EVAL_INTERVAL:-50} EVAL_ITERS=${EVAL_ITERS:-16}
fi
export LR_WARMUP_ITERS=${LR_WARMUP_ITERS:-$((TRAIN_ITERS / 10))}
export LOG_INTERVAL=1 NUM_WORKERS=0
export DATA_PATH=$DATA VOCAB_SIZE=257 DATA_CACHE_PATH=$OUT/data_cache
export WANDB_MODE=${WANDB_MODE:-offline} WANDB_PROJECT=${WANDB_PROJECT:-megatron-residuals-demo}

RUNS=(residual mhc block_attnres)
declare -A OPTIONS=([block_attnres]="--residual-block-layers 2")

# Prints "ITERATION LOSS" of the newest iteration in a log.
last_iteration() {
  sed -n 's/.* iteration *\([0-9]*\)\/.* lm loss: \([0-9.E+-]*\).*/\1 \2/p' "$1" | tail -n 1
}

# Prints the validation loss that Megatron takes when training is over.
final_loss() {
  sed -n 's/^ *validation loss at .* on validation set | lm loss value: \([0-9.E+-]*\).*/\1/p' "$1"
}

# One line for the run of process $1 with log $2, renewed every second on a terminal, else every 20.
show_progress() {
  local iteration loss begun=$SECONDS shown=-100 every=20 end='\n'
  if [[ -t 1 ]]; then every=1 end='\r'; fi
  while kill -0 "$1" 2>/dev/null; do
    if ((SECONDS - shown >= every)); then
      shown=$SECONDS
      if read -r iteration loss < <(last_iteration "$2"); then
        printf "  %-14s iteration %4d/%d   loss %.3f   %3d s$end" \
          "$3" "$iteration" "$TRAIN_ITERS" "$loss" $((SECONDS - begun))
      else
        printf "  %-14s starting %36d s$end" "$3" $((SECONDS - begun))
      fi
    fi
    sleep 1
  done
}

# Says that $1, and shows log $2: torchrun's own report comes last, so the errors before it first.
fail() {
  {
    printf '\n%s. Errors in %s:\n\n' "$1" "$2"
    grep -E '^(\[rank[0-9]+\]: )?[A-Za-z_.]*(Error|Exception)\b' "$2" | sort -u | head -n 8 || true
    printf '\nand its end:\n\n'
    tail -n 30 "$2"
  } >&2
  exit 1
}

train() {
  local run=$1 folder=$OUT/$1 status=0 begun=$SECONDS
  rm -rf "$folder"
  mkdir -p "$folder"
  : >"$folder/log.txt" # it is read before the background process has made it
  RESIDUAL=$run RUN_DIR=$folder WANDB_NAME=$run \
    RESIDUAL_OPTIONS="--residual-log-interval 10 ${OPTIONS[$run]:-}" \
    launch/pretrain.sh >"$folder/log.txt" 2>&1 &
  running=$!
  show_progress "$running" "$folder/log.txt" "$run"
  wait "$running" || status=$?
  running=
  ((status == 0)) || fail "$run failed with status $status" "$folder/log.txt"
  printf '  %-14s iteration %4d/%d   validation loss %.4f   %3d s\n' "$run" \
    "$TRAIN_ITERS" "$TRAIN_ITERS" "$(final_loss "$folder/log.txt")" $((SECONDS - begun))
}

running=
trap '[[ -z $running ]] || kill "$running"' EXIT

begun=$SECONDS
echo "data: Python's standard library, byte by byte"
mkdir -p "$OUT"
"$PYTHON" examples/prepare_data.py --output-prefix "$DATA" --max-mib "${MAX_MIB:-16}" \
  2>"$OUT/data_log.txt" || fail "preparing the data failed" "$OUT/data_log.txt"
echo "training: $TRAIN_ITERS iterations, logs in $OUT/<run>/log.txt"
for run in "${RUNS[@]}"; do
  train "$run"
done
"$PYTHON" examples/demo_report.py "$OUT" --runs "${RUNS[@]}" --data-summary "$DATA.json"
echo "$((SECONDS - begun)) s in all"
