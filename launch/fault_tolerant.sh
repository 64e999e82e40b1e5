#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# Run on every node: the launcher of nvidia-resiliency-ext in torchrun's place.
#
#   [VARIABLE=value ...] launch/fault_tolerant.sh [-- MEGATRON_ARGS...]
#
#   NUM_NODES=4 MASTER_ADDR=node0 CHECKPOINT_PATH=/shared/ckpt launch/fault_tolerant.sh
#
# Besides ranks that fail it restarts those that hang: FT_OPTIONS has the longest times that set-up,
# a step and a checkpoint may take, to be set for your model. All variables of launch/multi_node.sh
# apply.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
read_settings "$@"
export LAUNCHER=ft_launcher
export NUM_NODES=${NUM_NODES:-1} MASTER_ADDR=${MASTER_ADDR:-localhost}
export FT_OPTIONS=${FT_OPTIONS:---ft-rank-section-timeouts=setup:900,step:300,checkpointing:600 \
  --ft-rank-out-of-section-timeout=300}
[[ ${DRY_RUN:-0} == 1 || ${REHEARSE:-0} == 1 ]] || require_launcher
exec "$ROOT/launch/multi_node.sh" -- "${EXTRA_ARGS[@]}"
