#!/usr/bin/env bash
# Megatron-LM, megatron-core==0.18.2, transformer-engine==2.12.0; 64 nodes of 8 x H100 80 GB
#SBATCH --job-name=dense-405b
#SBATCH --nodes=64
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=7-00:00:00
#SBATCH --output=/logs/%x-%j.out

set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=12
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

MODEL_ARGS=(
    --num-layers 126
    --hidden-size 16384
    --ffn-hidden-size 53248
    --num-attention-heads 128
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 8192
    --seq-length 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model meta-llama/Llama-3.1-405B
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --context-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-iters 120000
    --lr 8e-5
    --min-lr 8e-7
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --recompute-activations
)
DATA_ARGS=(
    --data-path /data/tokens/mix_text_document
    --split 999,1,0
    --num-workers 4
)
OUTPUT_ARGS=(
    --save /ckpt/405b
    --load /ckpt/405b
    --save-interval 500
    --ckpt-format torch_dist
    --log-interval 1
    --eval-interval 1000
    --eval-iters 8
)

srun torchrun \
    --nnodes 64 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500" \
    pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}"
