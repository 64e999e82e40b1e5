#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# A small model on this machine's CPU, one process per rank, over gloo: to try a launch.
#
#   [VARIABLE=value ...] launch/cpu.sh [-- MEGATRON_ARGS...]
#
#   RESIDUAL=block_attnres RESIDUAL_OPTIONS="--residual-block-layers 1" launch/cpu.sh
#
# All variables of launch/pretrain.sh apply, DRY_RUN=1 and REHEARSE=1 among them.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
read_settings "$@"
export DEVICE=cpu GPUS_PER_NODE=${GPUS_PER_NODE:-2} PP=${PP:-2} VPP=${VPP:-2}
export NUM_LAYERS=${NUM_LAYERS:-4} HIDDEN_SIZE=${HIDDEN_SIZE:-64} FFN_HIDDEN_SIZE=${FFN_HIDDEN_SIZE:-128}
export NUM_ATTENTION_HEADS=${NUM_ATTENTION_HEADS:-4} SEQ_LENGTH=${SEQ_LENGTH:-64}
export VOCAB_SIZE=${VOCAB_SIZE:-256} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-4}
export TRAIN_ITERS=${TRAIN_ITERS:-5} EVAL_ITERS=${EVAL_ITERS:-1} LOG_INTERVAL=${LOG_INTERVAL:-1}
export NUM_WORKERS=${NUM_WORKERS:-0}
exec "$ROOT/launch/pretrain.sh" -- "${EXTRA_ARGS[@]}"
