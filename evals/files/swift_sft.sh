#!/usr/bin/env bash
# ms-swift==4.5.0, transformers==5.12.0, deepspeed==0.18.2; one node of 8 x L40S
#SBATCH --job-name=swift-qwen3-14b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=480G
#SBATCH --time=36:00:00
#SBATCH --output=/logs/%x-%j.out

set -euo pipefail

module load cuda/12.8
source /opt/venvs/swift/bin/activate

export HF_HOME=/scratch/hf
export MODELSCOPE_CACHE=/scratch/modelscope
export WANDB_PROJECT=swift-sft
export OMP_NUM_THREADS=8
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

MODEL=Qwen/Qwen3-14B
DATA=/data/sft/mixture.jsonl
OUT=/ckpt/swift/qwen3-14b

nvidia-smi --query-gpu=index,name,memory.total --format=csv
free -g

NPROC_PER_NODE=8 \
swift sft \
    --model "$MODEL" \
    --dataset "$DATA" \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --attn_impl flash_attn \
    --max_length 8192 \
    --packing true \
    --num_train_epochs 2 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --learning_rate 1e-5 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.05 \
    --weight_decay 0.1 \
    --gradient_checkpointing false \
    --fsdp fsdp2 \
    --deepspeed zero3_offload \
    --save_only_model true \
    --activation_offload true \
    --eval_steps 500 \
    --save_steps 500 \
    --save_total_limit 2 \
    --logging_steps 5 \
    --dataloader_num_workers 4 \
    --dataset_num_proc 16 \
    --report_to wandb \
    --output_dir "$OUT"

echo "finished at $(date --iso-8601=seconds)"
