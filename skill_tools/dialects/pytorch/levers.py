# SPDX-License-Identifier: Apache-2.0
"""The changes of a plain loop beside offloading: all of it by hand, each with the override that plans it.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.dialects import levers
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.pytorch.spread import BF16_SHARDS
from skill_tools.dialects.run import TrainingRun
from skill_tools.started import COMMAND

_LORA_RANK = 16
HOW_TO_FUSE = (
    "in Transformers' Trainer use_liger_kernel=True, in a loop of torch 2.13 "
    "torch.nn.functional.linear_cross_entropy(hidden, lm_head.weight, labels, "
    "options=torch.nn.LinearCrossEntropyOptions()); --overrides fused_loss=true"
)


def found(run: TrainingRun) -> Iterator[Lever]:
    """Yield the levers of a loop."""
    yield from levers.micro_batches(
        run,
        "micro_batch_size",
        "gradient_accumulation_steps",
        by_hand="in the loop: micro-batch {0}; --overrides micro_batch_size={0}",
    )
    if not run.fused_loss:
        settings: dict[str, object] = {"fused_loss": True}
        yield Lever(Kind.FUSED_LOSS, "a fused linear cross entropy", settings, by_hand=HOW_TO_FUSE)
    if run.is_fully_sharded and run.precision.weight_bytes >= 4:
        how = "in the loop: load the weights in bf16, then fully_shard; --overrides shard_dtype=bfloat16"
        yield Lever(Kind.SHARDS, "shards in bf16", BF16_SHARDS, by_hand=how)
    for lever in levers.more_gpus(run):
        how = f"{COMMAND} plan with --gpus {lever.gpus} says how to launch it and shard the model"
        yield lever._replace(label=f"{lever.label} with FSDP2", by_hand=how)
    yield from levers.sequences(
        run, "seq_length", by_hand="in the loop: sequences of {0} tokens; --overrides seq_length={0}"
    )
    if run.adapter is None:
        adapters = f"with PEFT in the loop: LoRA of rank {_LORA_RANK}; --overrides lora_rank={_LORA_RANK}"
        yield Lever(Kind.ADAPTERS, "LoRA", {"lora_rank": _LORA_RANK}, by_hand=adapters)
