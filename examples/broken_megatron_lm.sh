#!/usr/bin/env bash
# A Megatron-LM launch with flags that do not exist, and offload modes that exclude each other; the image has
# megatron-core==0.18.2 and transformer-engine==2.11.0.
# Try: offload lint examples/broken_megatron_lm.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --seq-length 8192
    --max-position-embeddings 8192
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
)
OFFLOAD_ARGS=(
    --optimizer-cpu-offload
    --optimizer-offload-fraction 0.5
    --overlap-cpu-optimizer-h2d-d2h
    --offload-optimizer-states
    --fine-grained-activation-offloading
    --offload-modules attn_proj
)

torchrun --nproc-per-node 8 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${OFFLOAD_ARGS[@]}" \
    --micro-batch-size 1 --global-batch-size 256
