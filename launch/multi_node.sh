#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# Run on every node: torchrun agents that find each other at a rendezvous and restart together.
#
#   [VARIABLE=value ...] launch/multi_node.sh [-- MEGATRON_ARGS...]
#
#   NUM_NODES=4 MASTER_ADDR=node0 CHECKPOINT_PATH=/shared/ckpt launch/multi_node.sh
#   RDZV=static NUM_NODES=4 NODE_RANK=2 MASTER_ADDR=node0 launch/multi_node.sh
#
# With the c10d rendezvous (the default) nodes need no numbers, and a failure on one restarts the
# ranks of all, MAX_RESTARTS times (3), from the last checkpoint. A static rendezvous needs the
# NODE_RANK of each node. All variables of launch/pretrain.sh apply, DRY_RUN=1 and REHEARSE=1 among
# them.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
read_settings "$@"
export NUM_NODES=${NUM_NODES:-2} RDZV=${RDZV:-c10d} MAX_RESTARTS=${MAX_RESTARTS:-3}
if [[ -z ${MASTER_ADDR:-} ]]; then
  refuse "MASTER_ADDR is not set; give the name of one of the nodes, the same on all"
fi
if [[ $RDZV == static && -z ${NODE_RANK:-} ]]; then
  refuse "NODE_RANK is not set; a static rendezvous needs it, 0 on MASTER_ADDR"
fi
exec "$ROOT/launch/pretrain.sh" -- "${EXTRA_ARGS[@]}"
