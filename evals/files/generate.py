"""Answers questions of a file with an 8B model on one RTX 3090 (transformers==4.57.1, accelerate==1.10.1)."""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "meta-llama/Llama-3.1-8B-Instruct"  # 8.03e9 parameters, 32 layers


def load():
    """Load the model in bf16 for inference.

    accelerate says at loading: Some parameters are on the meta device because they were offloaded to the cpu.
    """
    tokenizer = AutoTokenizer.from_pretrained(NAME, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        NAME,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        device_map="auto",
        max_memory={0: "9GiB", "cpu": "64GiB"},
        low_cpu_mem_usage=True,
    )
    model.eval()
    return tokenizer, model


def batches(questions: list[str], size: int):
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


@torch.inference_mode()
def answers(tokenizer, model, questions: list[str], new_tokens: int) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(0)
    output = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", type=Path, help="a question a line")
    parser.add_argument("answers", type=Path, help="JSON lines are written here")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=512)
    options = parser.parse_args()

    tokenizer, model = load()
    questions = options.questions.read_text(encoding="utf-8").splitlines()
    with options.answers.open("w", encoding="utf-8") as file:
        for batch in batches(questions, options.batch):
            started = time.perf_counter()
            for question, answer in zip(batch, answers(tokenizer, model, batch, options.new_tokens)):
                print(json.dumps({"question": question, "answer": answer}), file=file)
            print(f"{len(batch)} answers in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
