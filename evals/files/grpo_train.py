# trl==1.0.0, transformers==5.12.0, torch==2.10.0; accelerate launch --num_processes 8 grpo_train.py
"""GRPO on grade-school mathematics with a rule-based reward."""

import argparse
import re

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Think step by step. Put the final answer into \\boxed{}."


def boxed(text: str) -> str | None:
    """Return the text in the last box of a completion."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else None


def as_prompt(row: dict) -> dict:
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ],
        "target": row["answer"].split("####")[-1].strip().replace(",", ""),
    }


def correct(completions, target, **_):
    return [float(boxed(one[0]["content"]) == right) for one, right in zip(completions, target)]


def formatted(completions, **_):
    return [0.1 * (boxed(one[0]["content"]) is not None) for one in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--out", default="/ckpt/grpo-qwen3-8b")
    options = parser.parse_args()

    train = load_dataset("openai/gsm8k", "main", split="train").map(as_prompt)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")

    config = GRPOConfig(
        output_dir=options.out,
        learning_rate=1e-6,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=2048,
        temperature=0.9,
        beta=0.0,
        loss_type="dapo",
        bf16=True,
        gradient_checkpointing=True,
        activation_offloading=True,
        use_vllm=True,
        vllm_mode="server",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.3,
        logging_steps=1,
        save_steps=100,
        max_steps=1000,
        report_to="wandb",
    )
    trainer = GRPOTrainer(
        model=options.model,
        processing_class=tokenizer,
        reward_funcs=[correct, formatted],
        args=config,
        train_dataset=train,
    )
    trainer.train()
    trainer.save_model(options.out)


if __name__ == "__main__":
    main()
