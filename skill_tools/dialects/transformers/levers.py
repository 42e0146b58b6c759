# SPDX-License-Identifier: Apache-2.0
"""A Trainer's levers beside offloading: its batch, Liger's kernels, 8-bit optimizers, a quantized base of adapters.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, levers
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.transformers import CLASS, LENGTH
from skill_tools.dialects.transformers.classes import takes
from skill_tools.dialects.transformers.run import sharding_of

_OWN_LENGTH = "in the script: samples of {} tokens; its arguments have no length"
_WIDE_BYTES = 2
_OWN_SCRIPT = "(arguments of TRL; a script of one's own calls peft.get_peft_model)"


def found(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield the Trainer's levers; adapters are TRL's."""
    yield from levers.micro_batches(run, "micro_batch_size", "gradient_accumulation_steps")
    if not fields.flag(config, "use_liger_kernel"):
        yield Lever(Kind.FUSED_LOSS, "Liger's kernels with its fused loss", {"use_liger_kernel": True})
    sharded = sharding_of(config).stage
    if (
        run.adapter is None
        and not sharded
        and "adamw" in (fields.text(config, "optimizer") or "adamw_torch_fused")
    ):
        yield Lever(Kind.STATES, "8-bit Adam states", {"optimizer": "adamw_bnb_8bit"})
    is_packed = run.adapter is not None and run.adapter.base_weight_bytes < _WIDE_BYTES
    if run.adapter is None:
        settings = {"use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear"}
        yield Lever(Kind.ADAPTERS, "QLoRA", settings, by_hand=_OWN_SCRIPT)
    elif not is_packed:
        yield Lever(Kind.QUANTIZED, "QLoRA, the base in 4 bits", {"load_in_4bit": True})
    has_length = takes(str(config.value(CLASS)), "max_length")
    yield from levers.sequences(run, LENGTH, by_hand="" if has_length else _OWN_LENGTH)
    yield from levers.zero3(config, run)
    if sharded >= 3:
        yield from levers.more_gpus(run)
    elif (
        not sharded and not is_packed
    ):  # shards of packed weights need another storage than bitsandbytes' own
        yield from levers.more_gpus(run, {"fsdp": ["full_shard", "auto_wrap"]})
