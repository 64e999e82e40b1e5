#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# What the launch scripts share; sourced, not run. $ROOT is the repository, $0 the script in front.

# Prints the comment at the head of the script in front.
usage() {
  awk 'NR > 4 { if (!/^#( |$)/) exit; sub(/^# ?/, ""); print }' "$0"
}

# Says something about a call that cannot work, and ends the script.
refuse() {
  echo "$0: $1" >&2
  exit 2
}

# Sets EXTRA_ARGS from what follows --.
# shellcheck disable=SC2034 # for the scripts that source this
read_arguments() {
  EXTRA_ARGS=()
  (($#)) || return 0
  case "$1" in
  --) EXTRA_ARGS=("${@:2}") ;;
  -h | --help) usage && exit 0 ;;
  *) refuse "got '$1'; settings are environment variables, arguments come after --" ;;
  esac
}

# Refuses the variable $1 unless it has one of the values that follow.
check_choice() {
  local name=$1 choice allowed
  shift
  for choice in "$@"; do
    [[ ${!name} != "$choice" ]] || return 0
  done
  printf -v allowed '%s, ' "$@"
  refuse "$name is '${!name}'; allowed: ${allowed%, }"
}

# Sets what PRESET, a name in launch/presets or a file, says and the environment does not.
load_preset() {
  [[ -n ${PRESET:-} ]] || return 0
  local file=$PRESET
  [[ $PRESET == */* ]] || file=$ROOT/launch/presets/$PRESET.env
  if [[ ! -f $file ]]; then
    local known
    known=$(cd "$ROOT/launch/presets" && printf '%s ' *.env)
    refuse "there is no preset '$PRESET' ($file); there are: ${known//.env/}"
  fi
  # shellcheck source=/dev/null
  source "$file"
}

# Refuses a launcher that is not there.
require_launcher() {
  if [[ ${LAUNCHER:-} == ft_launcher ]] && ! command -v ft_launcher >/dev/null; then
    refuse "ft_launcher is not installed; pip install nvidia-resiliency-ext, or restart with \
torchrun instead: MAX_RESTARTS=${MAX_RESTARTS:-3} launch/multi_node.sh"
  fi
}

warn_of_restarts_without_checkpoints() {
  if ((${MAX_RESTARTS:-0} > 0)) && [[ -z ${CHECKPOINT_PATH:-} ]]; then
    echo "$0: a restart begins at iteration 0, since CHECKPOINT_PATH is not set" >&2
  fi
}

# Sets RUN_DIR, where logs go: beside the checkpoints of the run if those lie in a file system, so
# that two runs never share it; else $1.
set_run_dir() {
  local folder=${CHECKPOINT_PATH:-$1}
  [[ $folder != *://* ]] || folder=$1
  RUN_DIR=${RUN_DIR:-$folder}
}

# Exports WANDB_RUN_ID and WANDB_RESUME, so that a restart goes on in the same wandb run. The id is
# kept in the run directory; a run that starts anew, without checkpoints, gets a new one.
keep_wandb_run() {
  [[ -n ${WANDB_PROJECT:-} ]] || return 0
  local file=$RUN_DIR/wandb_run_id
  local new=${WANDB_RUN_ID:-}
  if [[ -n $new ]] || { [[ -z ${CHECKPOINT_PATH:-} ]] && ((${MAX_RESTARTS:-0} == 0)); }; then
    rm -f "$file"
  fi
  if [[ -z $new ]]; then
    new=$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')
  fi
  # Nodes that share the directory agree on whichever id comes first.
  (set -o noclobber && echo "$new" >"$file") 2>/dev/null || true
  WANDB_RUN_ID=$(<"$file")
  export WANDB_RUN_ID WANDB_RESUME=${WANDB_RESUME:-allow}
}

# Prints the command on stdout and, unless PREDICT=0, on stderr what crosses the pipeline and what
# is kept for backward. $1 is the number of GPUs.
dry_run() {
  local gpus=$1
  shift
  printf '%q ' "$@"
  echo
  [[ ${PREDICT:-1} != 0 ]] || return 0
  "${PYTHON:-python}" "$ROOT/launch/predict.py" --gpus "$gpus" -- "$@" >&2
}
