#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# A SLURM job: one launcher on every node, started by srun.
#
#   [VARIABLE=value ...] sbatch --nodes 4 launch/slurm.sh [-- MEGATRON_ARGS...]
#
#   RESIDUAL=mhc PRESET=v4_layout CHECKPOINT_PATH=/shared/ckpt sbatch --nodes 8 launch/slurm.sh
#   CONTAINER_IMAGE=/images/pytorch.sqsh CONTAINER_MOUNTS=/shared:/shared sbatch launch/slurm.sh
#   DRY_RUN=1 NUM_NODES=4 launch/slurm.sh                  print what would be run, without SLURM
#   REHEARSE=1 NUM_NODES=4 launch/slurm.sh                 one step on fake tensors, without SLURM
#
# Submit from the root of the repository, or set REPOSITORY. SCRIPT is what runs on a node:
# multi_node.sh, or fault_tolerant.sh. SRUN_OPTIONS go to srun. Partition, account and time are
# options of sbatch. All variables of SCRIPT apply; they reach the nodes through the environment.
#SBATCH --job-name=megatron-residuals
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

# SLURM runs a copy of this file from a folder of its own.
REPOSITORY=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}
ROOT=$REPOSITORY
if [[ ! -f $ROOT/launch/common.sh ]]; then
  echo "$0: $ROOT is not the repository; submit from its root, or set REPOSITORY" >&2
  exit 2
fi
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
read_settings "$@"
SCRIPT=${SCRIPT:-multi_node.sh}
check_choice SCRIPT multi_node.sh fault_tolerant.sh

export NUM_NODES=${SLURM_JOB_NUM_NODES:-${NUM_NODES:-2}}
export RDZV_ID=${RDZV_ID:-${SLURM_JOB_ID:-megatron-residuals}}
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
  [[ -n ${MASTER_ADDR:-} ]] || read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
elif [[ ${DRY_RUN:-0} != 1 && ${REHEARSE:-0} != 1 ]]; then
  refuse "this is no SLURM job; submit it with sbatch, or set DRY_RUN=1 to see what it would run"
fi
export MASTER_ADDR=${MASTER_ADDR:-first-node}
# A job that is requeued keeps its number, and a later one its checkpoints: both go on where it was.
set_run_dir "$ROOT/runs/${SLURM_JOB_NAME:-megatron-residuals}${SLURM_JOB_ID:+-$SLURM_JOB_ID}"
export RUN_DIR

STEP=(srun --nodes "$NUM_NODES" --ntasks "$NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit=1)
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
  STEP+=(--container-image "$CONTAINER_IMAGE")
  STEP+=(--container-mounts "${CONTAINER_MOUNTS:-$ROOT:$ROOT}" --container-workdir "$ROOT")
fi
split_words SRUN_OPTIONS
STEP+=("${OPTIONS[@]}")
# Each node learns its number from SLURM, for RDZV=static.
# shellcheck disable=SC2016
STEP+=(bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" -- "$@"' "$ROOT/launch/$SCRIPT" "${EXTRA_ARGS[@]}")

if [[ ${REHEARSE:-0} == 1 ]]; then
  exec "$ROOT/launch/$SCRIPT" -- "${EXTRA_ARGS[@]}"
fi
if [[ ${DRY_RUN:-0} == 1 ]]; then
  printf '%q ' "${STEP[@]}"
  echo
  export NODE_RANK=${NODE_RANK:-0}
  exec "$ROOT/launch/$SCRIPT" -- "${EXTRA_ARGS[@]}"
fi
exec "${STEP[@]}"
