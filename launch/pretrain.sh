#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# Pretrain a GPT with Megatron-Core, its residual connection replaced.
#
#   [VARIABLE=value ...] launch/pretrain.sh [-- MEGATRON_ARGS...]
#
#   RESIDUAL=mhc launch/pretrain.sh                        one node, 8 GPUs, mock data
#   RESIDUAL=none launch/pretrain.sh                       the same launch with stock Megatron
#   PRESET=moe RESIDUAL=mhc launch/pretrain.sh             sizes from launch/presets/moe.env
#   RESIDUAL=block_attnres DATA_PATH=/data/corpus TOKENIZER_MODEL=/data/tokenizer \
#     NUM_NODES=4 NODE_RANK=$SLURM_NODEID MASTER_ADDR=node0 launch/pretrain.sh
#   DRY_RUN=1 RESIDUAL=mhc launch/pretrain.sh              print the command, what crosses the
#                                                          pipeline and what is kept, and stop
#   REHEARSE=1 RESIDUAL=mhc launch/pretrain.sh             run one step of it here on fake tensors, as
#                                                          one rank of each kind: memory, messages;
#                                                          REHEARSE_OPTIONS="--budget-gib 80"
#   DEVICE=cpu GPUS_PER_NODE=2 ... launch/pretrain.sh      ranks on this machine's CPU, over gloo
#
# The common part of every launch; multi_node.sh, slurm.sh, fault_tolerant.sh and cpu.sh beside it
# set variables and end here. Every ${NAME:-default} below is a variable to set.
#
# Arguments after -- win: over the same option in this script, over one that cannot stand beside them
# (--squared-relu over --swiglu, --train-samples over --train-iters), and --no-NAME takes --NAME out.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$ROOT/launch/common.sh"
read_settings "$@"
# what others are worked out from
take_from_arguments SEQ_LENGTH --seq-length TRAIN_ITERS --train-iters TRAIN_SAMPLES --train-samples \
  TP --tensor-model-parallel-size PP --pipeline-model-parallel-size
check_values

PYTHON=${PYTHON:-python}
ENTRY=${ENTRY:-$ROOT/examples/pretrain_gpt.py}
DEVICE=${DEVICE:-gpu}
RESIDUAL=${RESIDUAL:-residual}
check_choice DEVICE gpu cpu

# where the ranks run, and what starts them: torchrun, or ft_launcher (fault_tolerant.sh)
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-1}
LAUNCHER=${LAUNCHER:-torchrun}
RDZV=${RDZV:-static}
MAX_RESTARTS=${MAX_RESTARTS:-0}
check_choice LAUNCHER torchrun ft_launcher
check_choice RDZV static c10d
DISTRIBUTED_ARGS=(--nproc_per_node "$GPUS_PER_NODE" --nnodes "$NUM_NODES")
if [[ $RDZV == c10d ]]; then
  # Ranks that share the agents' store find the addresses of the run before when they are started
  # again: agents count restarts each for itself (pytorch issue 135712).
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
  DISTRIBUTED_ARGS+=(
    --rdzv_backend c10d
    --rdzv_endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29400}"
    --rdzv_id "${RDZV_ID:-${SLURM_JOB_ID:-megatron-residuals}}"
  )
elif ((NUM_NODES == 1)) && [[ -z ${MASTER_PORT:-} ]]; then
  DISTRIBUTED_ARGS+=(--standalone) # takes a port that is free
else
  DISTRIBUTED_ARGS+=(
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
  )
fi
if ((MAX_RESTARTS > 0)); then
  DISTRIBUTED_ARGS+=(--max_restarts "$MAX_RESTARTS")
fi
if [[ -n ${LOCAL_ADDR:-} ]]; then
  DISTRIBUTED_ARGS+=(--local_addr "$LOCAL_ADDR") # where host names do not resolve
fi

# the model
SEQ_LENGTH=${SEQ_LENGTH:-4096}
MODEL_ARGS=(
  --num-layers "${NUM_LAYERS:-24}"
  --hidden-size "${HIDDEN_SIZE:-2048}"
  --ffn-hidden-size "${FFN_HIDDEN_SIZE:-5504}"
  --num-attention-heads "${NUM_ATTENTION_HEADS:-16}"
  --seq-length "$SEQ_LENGTH"
  --max-position-embeddings "$SEQ_LENGTH"
  --position-embedding-type rope
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
  --init-method-std "${INIT_STD:-0.02}"
)
if [[ -n ${NUM_QUERY_GROUPS:-} ]]; then
  MODEL_ARGS+=(--group-query-attention --num-query-groups "$NUM_QUERY_GROUPS")
fi
EXPERT_PARALLEL_ARGS=()
if [[ -n ${NUM_EXPERTS:-} ]]; then
  MODEL_ARGS+=(
    --num-experts "$NUM_EXPERTS"
    --moe-router-topk "${MOE_ROUTER_TOPK:-2}"
    --moe-ffn-hidden-size "${MOE_FFN_HIDDEN_SIZE:-1408}"
    --moe-layer-freq "${MOE_LAYER_FREQ:-1}"
    --moe-router-load-balancing-type "${MOE_BALANCING:-aux_loss}"
    --moe-aux-loss-coeff "${MOE_AUX_LOSS_COEFF:-1e-2}"
    --moe-token-dispatcher-type alltoall
  )
  EXPERT_PARALLEL_ARGS=(--expert-model-parallel-size "${EP:-1}")
fi

# how it is trained
TRAIN_ITERS=${TRAIN_ITERS:-10000}
if [[ -n ${TRAIN_SAMPLES:-} ]]; then
  TRAINING_ARGS=(--train-samples "$TRAIN_SAMPLES" --lr-warmup-samples "$((TRAIN_SAMPLES / 20))")
else
  TRAINING_ARGS=(--train-iters "$TRAIN_ITERS")
  TRAINING_ARGS+=(--lr-warmup-iters "${LR_WARMUP_ITERS:-$((TRAIN_ITERS / 20))}")
fi
TRAINING_ARGS+=(
  --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
  --global-batch-size "${GLOBAL_BATCH_SIZE:-128}"
  --lr "${LR:-3e-4}"
  --min-lr "${MIN_LR:-3e-5}"
  --lr-decay-style cosine
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --clip-grad 1.0
  --seed "${SEED:-1234}"
)

# how it is laid out over the ranks
TP=${TP:-1}
PP=${PP:-2}
VPP=${VPP:-2}
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP")
MODEL_PARALLEL_ARGS+=("${EXPERT_PARALLEL_ARGS[@]}")
if [[ -n ${PIPELINE_LAYOUT:-} ]]; then # e.g. Et*3|(t*4|)*14t*2,L: the chunks follow from it
  MODEL_PARALLEL_ARGS+=(--pipeline-model-parallel-layout "$PIPELINE_LAYOUT")
elif ((PP > 1 && VPP > 1)); then # one rank has no virtual stages
  MODEL_PARALLEL_ARGS+=(--num-virtual-stages-per-pipeline-rank "$VPP")
fi
if ((TP > 1)); then
  MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi
if ((${CP:-1} > 1)); then
  MODEL_PARALLEL_ARGS+=(--context-parallel-size "$CP")
fi

# kernels, precision and transport of the device
CPU_HOST=()
if [[ $DEVICE == gpu ]]; then
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
  MODEL_ARGS+=(--transformer-impl transformer_engine)
  TRAINING_ARGS+=(--bf16 --distributed-backend nccl)
  MODEL_PARALLEL_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
else
  # Fused kernels are CUDA code. Gloo over the loopback device does not depend on the host's name.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  if [[ $(uname) == Linux ]] && ((NUM_NODES == 1)); then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  fi
  CPU_HOST=(--cpu-host)
  MODEL_ARGS+=(
    --transformer-impl local
    --use-cpu-initialization
    --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
    --no-bias-gelu-fusion
    --no-bias-swiglu-fusion
    --no-bias-dropout-fusion
    --no-rope-fusion
    --no-persist-layer-norm
  )
  TRAINING_ARGS+=(--distributed-backend gloo)
fi

# the data: DATA_PATH is the prefix of a .bin/.idx pair; without it, Megatron makes tokens up
if [[ -n ${DATA_PATH:-} ]]; then
  DATA_ARGS=(--data-path "$DATA_PATH" --split "${SPLIT:-95,5,0}")
else
  DATA_ARGS=(--mock-data)
fi
if [[ -n ${DATA_CACHE_PATH:-} ]]; then
  DATA_ARGS+=(--data-cache-path "$DATA_CACHE_PATH")
fi
if [[ -n ${TOKENIZER_MODEL:-} ]]; then
  DATA_ARGS+=(--tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}")
  DATA_ARGS+=(--tokenizer-model "$TOKENIZER_MODEL")
else
  DATA_ARGS+=(--tokenizer-type NullTokenizer --vocab-size "${VOCAB_SIZE:-32000}")
fi
DATA_ARGS+=(--num-workers "${NUM_WORKERS:-2}")

# evaluation, logs, checkpoints
set_run_dir "$PWD/runs/$RESIDUAL"
export MEGATRON_RESIDUALS_LOG_DIR=${MEGATRON_RESIDUALS_LOG_DIR:-$RUN_DIR}
EVAL_AND_LOGGING_ARGS=(
  --eval-interval "${EVAL_INTERVAL:-500}"
  --eval-iters "${EVAL_ITERS:-10}"
  --log-interval "${LOG_INTERVAL:-10}"
  --tensorboard-dir "$RUN_DIR/tensorboard" # wandb gets its scalars from the same place
  --tensorboard-log-interval 1
  --log-timers-to-tensorboard # without it there is no iteration time
  --no-one-logger
)
if [[ $LAUNCHER == ft_launcher ]]; then
  EVAL_AND_LOGGING_ARGS+=(--enable-ft-package)
fi
if [[ -n ${WANDB_PROJECT:-} ]]; then
  EVAL_AND_LOGGING_ARGS+=(
    --wandb-project "$WANDB_PROJECT"
    --wandb-exp-name "${WANDB_NAME:-$RESIDUAL}"
    --wandb-save-dir "$RUN_DIR"
  )
fi
if [[ -n ${CHECKPOINT_PATH:-} ]]; then
  EVAL_AND_LOGGING_ARGS+=(
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval "${SAVE_INTERVAL:-1000}"
  )
fi

# the residual connection. This array and the module that runs the script are all that differs
# from a stock launch, torchrun "${DISTRIBUTED_ARGS[@]}" "$ENTRY" ...
RESIDUAL_ARGS=(--residual "$RESIDUAL")
MODULE=(-m megatron_residuals.run "${CPU_HOST[@]}")
if [[ $RESIDUAL == none ]]; then
  RESIDUAL_ARGS=()
  [[ $DEVICE == cpu ]] || MODULE=()
fi
split_words RESIDUAL_OPTIONS # e.g. "--residual-streams 2"
RESIDUAL_ARGS+=("${OPTIONS[@]}")

# what among the arguments after -- an option cannot stand beside
PER_SPLIT="--train-data-path --valid-data-path --test-data-path --per-split-data-args-path"
CHUNKS="--num-layers-per-virtual-pipeline-stage --pipeline-model-parallel-layout"
UNEVEN="--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers"
declare -A GIVES_WAY_TO=(
  [--swiglu]="--squared-relu --quick-geglu"
  [--bf16]="--fp16"
  [--global-batch-size]="--step-batch-size-schedule"
  [--lr-warmup-iters]="--lr-warmup-fraction"
  [--lr-warmup-samples]="--lr-warmup-fraction"
  [--num-virtual-stages-per-pipeline-rank]=$CHUNKS
  [--pipeline-model-parallel-layout]="$CHUNKS $UNEVEN --num-virtual-stages-per-pipeline-rank"
  [--mock-data]="--data-path --data-args-path $PER_SPLIT"
  [--data-path]="--mock-data --data-args-path $PER_SPLIT"
  [--split]="--mock-data $PER_SPLIT"
  [--vocab-size]="--tokenizer-model"
)
give_way "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
  "${EVAL_AND_LOGGING_ARGS[@]}"

if [[ $LAUNCHER == ft_launcher ]]; then
  split_words FT_OPTIONS
  START=(ft_launcher "${DISTRIBUTED_ARGS[@]}" "${OPTIONS[@]}")
else
  START=("$PYTHON" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}")
fi
COMMAND=("${START[@]}" "${MODULE[@]}" "$ENTRY" "${KEPT[@]}" "${RESIDUAL_ARGS[@]}" "${EXTRA_ARGS[@]}")
if [[ ${DRY_RUN:-0} == 1 ]]; then
  dry_run "$((NUM_NODES * GPUS_PER_NODE))" "${COMMAND[@]}"
  exit
fi
if [[ ${REHEARSE:-0} == 1 ]]; then
  split_words REHEARSE_OPTIONS
  exec "$PYTHON" -m megatron_residuals.run --rehearse "$((NUM_NODES * GPUS_PER_NODE))" \
    "${OPTIONS[@]}" "${CPU_HOST[@]}" "$ENTRY" "${KEPT[@]}" "${RESIDUAL_ARGS[@]}" "${EXTRA_ARGS[@]}"
fi
require_launcher
mkdir -p "$RUN_DIR"
warn_of_restarts_without_checkpoints
keep_wandb_run
exec "${COMMAND[@]}"
