#!/usr/bin/env bash
# vllm==0.12.0; one node of 4 x H100 80 GB; meta-llama/Llama-3.3-70B-Instruct (80 layers, 64 heads, 8 KV heads, head size 128)
#SBATCH --job-name=serve-llama70b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=48
#SBATCH --mem=400G
#SBATCH --time=72:00:00
#SBATCH --output=/logs/%x-%j.out

set -euo pipefail

module load cuda/12.8
source /opt/venvs/vllm/bin/activate

export HF_HOME=/scratch/hf
export VLLM_LOGGING_LEVEL=INFO
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=8

MODEL=meta-llama/Llama-3.3-70B-Instruct
PORT=${PORT:-8000}
HOST=$(hostname -f)

nvidia-smi --query-gpu=index,name,memory.total --format=csv
echo "$HOST:$PORT" > /shared/endpoints/llama70b

stop() {
    rm -f /shared/endpoints/llama70b
    kill "$SERVER" 2>/dev/null || true
}
trap stop EXIT

vllm serve "$MODEL" \
    --host 0.0.0.0 \
    --port "$PORT" \
    --served-model-name llama-70b \
    --dtype bfloat16 \
    --quantization fp8 \
    --kv-cache-dtype fp8 \
    --tensor-parallel-size 4 \
    --max-model-len 65536 \
    --max-num-seqs 128 \
    --max-num-batched-tokens 8192 \
    --gpu-memory-utilization 0.92 \
    --swap-space 16 \
    --enable-prefix-caching \
    --enable-chunked-prefill \
    --disable-log-requests &
SERVER=$!

for attempt in $(seq 1 120); do
    if curl --silent --fail "http://localhost:$PORT/health"; then
        echo "ready after $((attempt * 10)) s"
        break
    fi
    sleep 10
done

wait "$SERVER"
