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

# Sets EXTRA_ARGS from what follows --, and the variables that PRESET sets; refuses what is no value.
read_settings() {
  read_arguments "$@"
  load_preset
  check_values
}

# Sets EXTRA_ARGS from what follows --.
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

# Variables that hold a number, if they are set.
COUNTS=(
  GPUS_PER_NODE NUM_NODES SLURM_JOB_NUM_NODES NODE_RANK MASTER_PORT MAX_RESTARTS
  NUM_LAYERS HIDDEN_SIZE FFN_HIDDEN_SIZE NUM_ATTENTION_HEADS NUM_QUERY_GROUPS SEQ_LENGTH VOCAB_SIZE
  NUM_EXPERTS MOE_ROUTER_TOPK MOE_FFN_HIDDEN_SIZE TP PP VPP CP EP
  MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS TRAIN_SAMPLES LR_WARMUP_ITERS SEED NUM_WORKERS
  EVAL_INTERVAL EVAL_ITERS LOG_INTERVAL SAVE_INTERVAL
)
DECIMALS=(INIT_STD LR MIN_LR MOE_AUX_LOSS_COEFF MAX_MIB)
SWITCHES=(DRY_RUN PREDICT REHEARSE)

# Refuses a number that is not written in digits, before it is calculated with: bash takes a name for
# a variable and runs a command that stands in an index, and a leading 0 for octal.
check_values() {
  check_pattern '^(0|[1-9][0-9]{0,14})$' "a whole number in digits, such as 8" "${COUNTS[@]}"
  check_pattern '^[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$' "a number, such as 0.02 or 3e-4" "${DECIMALS[@]}"
  check_pattern '^[01]$' "0 or 1" "${SWITCHES[@]}"
}

# Refuses those of the variables $3... that are set to what pattern $1 does not match; $2 says what it
# does.
check_pattern() {
  local pattern=$1 allowed=$2 name
  for name in "${@:3}"; do
    [[ -z ${!name:-} || ${!name} =~ $pattern ]] || refuse "$name is '${!name}'; give $allowed"
  done
}

# Sets OPTIONS to the words of the variable $1, on however many lines they stand.
# shellcheck disable=SC2034 # for the scripts that source this
split_words() {
  OPTIONS=()
  read -rd '' -a OPTIONS <<<"${!1:-}" || true # it looks for a NUL and finds the end
}

# Sets each variable $1 to what the arguments after -- say for the option $2, if they do.
take_from_arguments() {
  local i
  while (($# > 0)); do
    for ((i = 0; i < ${#EXTRA_ARGS[@]}; i++)); do
      case ${EXTRA_ARGS[i]} in
      "$2") printf -v "$1" %s "${EXTRA_ARGS[i + 1]:-}" ;;
      "$2="*) printf -v "$1" %s "${EXTRA_ARGS[i]#*=}" ;;
      esac
    done
    shift 2
  done
}

# Sets KEPT to the words that follow, without the options that give way to an argument after --: to
# themselves, to one that GIVES_WAY_TO names, or to --no-NAME, which is then done with.
give_way() {
  local word taken extra left keep=1
  KEPT=()
  for word in "$@"; do
    if [[ $word == --* ]]; then
      keep=1 left=() taken=" $word --no-${word#--} ${GIVES_WAY_TO[$word]:-} "
      for extra in "${EXTRA_ARGS[@]}"; do
        [[ $extra != --* || $taken != *" ${extra%%=*} "* ]] || keep=0
        [[ $extra == "--no-${word#--}" ]] || left+=("$extra")
      done
      EXTRA_ARGS=("${left[@]}")
    fi
    ((keep == 0)) || KEPT+=("$word")
  done
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
