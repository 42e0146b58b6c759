#!/usr/bin/env bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
# Llama-3-70B continued pretraining. Container: megatron-core 0.18.2, transformer-engine 2.11.0, torch 2.10.0
set -euo pipefail

export NCCL_DEBUG=WARN
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export OMP_NUM_THREADS=1
export CUDA_DEVICE_MAX_CONNECTIONS=1

CHECKPOINT=${CHECKPOINT:-/ckpt/llama3-70b}
DATA=${DATA:-/data/mix}

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --transformer-impl transformer_engine
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAIN_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 20000
    --lr 1.0e-5
    --min-lr 1.0e-6
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

FP8_ARGS=(
    --fp8-format hybrid
    --fp8-recipe tensorwise
    --fp8-param-gather
)

OFFLOAD_ARGS=(
    --optimizer-cpu-offload
    --optimizer-offload-fraction 1.2
    --overlap-cpu-optimizer-h2d-d2h
    --pin-cpu-grads
    --offload-optimizer-states
    --cpu-offloading-num-layers 80
    --fine-grained-activation-offloading
    --offload-modules core_attn mlp_act
    --recompute-granularity selective
)

DATA_ARGS=(
    --data-path "${DATA}/train_text_document"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model meta-llama/Meta-Llama-3-70B
    --split 99,1,0
)

CKPT_ARGS=(
    --save "${CHECKPOINT}"
    --load "${CHECKPOINT}"
    --save-interval 500
    --ckpt-format torch_dist
)

srun torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR}:29500" \
    pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" \
    "${FP8_ARGS[@]}" \
    "${OFFLOAD_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${CKPT_ARGS[@]}"
