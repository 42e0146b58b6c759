#!/usr/bin/env bash
# The same launch with half of the optimizer's update on the CPU, and the attention inputs offloaded; the image has
# megatron-core==0.18.2 and transformer-engine==2.11.0.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NVTE_CPU_OFFLOAD_V1=1
export OMP_NUM_THREADS=12

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --seq-length 8192
    --max-position-embeddings 8192
    --bf16
    --transformer-impl transformer_engine
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
)
OFFLOAD_ARGS=(
    --optimizer-cpu-offload
    --optimizer-offload-fraction 0.5
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
    --dist-ckpt-optim-fully-reshardable
    --fine-grained-activation-offloading
    --offload-modules core_attn attn_proj
)

torchrun --nproc-per-node 8 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" \
    --micro-batch-size 1 --global-batch-size 256
