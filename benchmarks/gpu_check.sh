#!/usr/bin/env bash
# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
#
# Everything that only a GPU can show, in one go of at most 8 minutes on one H200:
# parity at full size, bandwidth, peers, whole-model overhead, a short training, a hybrid model,
# generation, what a rehearsal says beside the allocator; with two GPUs, what the communicators of
# pipeline messages take.
#
#   benchmarks/gpu_check.sh [OUTPUT_DIRECTORY]      needs torch, triton, megatron-core
#   REDUCED=1 benchmarks/gpu_check.sh               the same steps, tiny, on the CPU host
#
# PYTHON names the interpreter. Peers (fla, liger_kernel) and layers of Transformer Engine are taken
# along where installed.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

out=${1:-runs/gpu_check}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1

if [[ -n ${REDUCED:-} ]]; then
    device=cpu
    sizes=(--tokens 96 --hidden 64)
    odd=(--tokens 33 --hidden 100)
    model=(--layers 2 --hidden-size 128 --seq-length 64 --rounds 1)
    training=(--layers 1 --hidden-size 64 --seq-length 32 --iterations 8)
    decode=(--layers 2 --hidden-size 128 --prompt 8 --new-tokens 2 --rounds 1)
    rehearsal=(--layers 2 --hidden-size 64 --seq-length 32 --models plain)
    hybrid=(--hidden-size 64 --seq-length 32 --distributed-backend gloo --use-cpu-initialization)
    host=(--cpu-host)
    rounds=2
else
    device=cuda
    sizes=(--tokens 32768 --hidden 7168)
    odd=(--tokens 4999 --hidden 2880)
    model=(--layers 8 --hidden-size 4096 --seq-length 4096 --micro-batch-size 2 --rounds 10)
    training=(--layers 6 --hidden-size 1024 --seq-length 1024 --micro-batch-size 4 --iterations 60)
    decode=(--layers 12 --hidden-size 4096 --prompt 512 --new-tokens 64 --rounds 3)
    rehearsal=(--layers 8 --hidden-size 2048 --seq-length 2048)
    hybrid=(--hidden-size 1024 --seq-length 1024 --bf16)
    host=()
    rounds=10
fi

failed=()
step() {
    local name=$1 limit=$2
    shift 2
    printf '\n== %s\n' "$name"
    local began=$SECONDS
    timeout "$limit" "$python" -m "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
    printf '== %s: %s s\n' "$name" "$((SECONDS - began))"
}

step parity 120 benchmarks.parity --device "$device" --dtype bfloat16 "${sizes[@]}"
step parity_odd 60 benchmarks.parity --device "$device" "${odd[@]}"
for mechanism in mhc attnres; do
    step "$mechanism" 150 benchmarks.kernels --mechanism "$mechanism" --device "$device" \
        --dtype bfloat16 --rounds "$rounds" "${sizes[@]}" --json "$out/$mechanism.json"
done
step model 120 benchmarks.model --device "$device" --dtype bfloat16 "${model[@]}" \
    --model 'plain=residual()' \
    --model 'mhc=mhc()' \
    --model 'mhc torch=mhc(kernels="torch")' \
    --model 'ihc=ihc()' \
    --model 'single_pass_mhc=single_pass_mhc()' \
    --model 'block_attnres=block_attnres()' \
    --model 'block_attnres one-phase=block_attnres(two_phase="off")' \
    --model 'block_attnres torch=block_attnres(kernels="torch")' \
    --json "$out/model.json"
if [[ $device == cuda ]] && "$python" -c 'import transformer_engine.pytorch' 2>/dev/null; then
    step model_te 90 benchmarks.model --device cuda --dtype bfloat16 "${model[@]}" \
        --transformer-engine --json "$out/model_te.json"
fi
step training 120 benchmarks.training --device "$device" --dtype bfloat16 "${training[@]}" \
    --model 'plain=residual()' \
    --model 'mhc=mhc()' \
    --model 'mhc torch=mhc(kernels="torch")' \
    --model 'block_attnres=block_attnres()' \
    --model 'block_attnres torch=block_attnres(kernels="torch")' \
    --json "$out/training.json"

hybrid+=(--num-attention-heads 4 --max-position-embeddings 4096 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --eval-iters 0
    --eval-interval 10 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 96
    --num-workers 0 --no-one-logger --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --num-experts 4
    --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall)
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=${MASTER_PORT:-29512} \
    step hybrid 60 megatron_residuals.run ${host[@]+"${host[@]}"} examples/pretrain_hybrid.py \
    "${hybrid[@]}" --hybrid-layer-pattern '*-*E' --residual block_attnres
step decode 60 benchmarks.decode --device "$device" --dtype bfloat16 "${decode[@]}" \
    --json "$out/decode.json"
step rehearsal 90 benchmarks.rehearsal --device "$device" "${rehearsal[@]}" \
    --json "$out/rehearsal.json"

if [[ $device == cpu ]] || "$python" -c 'import torch; exit(torch.cuda.device_count() < 2)'; then
    step communicators 60 torch.distributed.run --nproc_per_node 2 -m benchmarks.communicators \
        --device "$device"
fi

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo 'all steps passed'
