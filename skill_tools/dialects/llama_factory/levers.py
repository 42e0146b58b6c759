# SPDX-License-Identifier: Apache-2.0
"""The levers of LLaMA-Factory beside offloading: its batch, Liger's kernels, 8-bit states, QLoRA, ZeRO-3's shards.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, levers
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.run import TrainingRun

_OWN = "llamafactory."
_BY_TORCHRUN = "launched with FORCE_TORCHRUN=1, also on one GPU"
_PRESET = "examples/deepspeed/ds_z3_config.json"
_PRESETS_THAT_OFFLOAD = (
    ("the optimizer on the CPU by ZeRO-2", "examples/deepspeed/ds_z2_offload_config.json", True),
    (
        "the optimizer and the weights on the CPU by ZeRO-3",
        "examples/deepspeed/ds_z3_offload_config.json",
        False,
    ),
)
# lint cannot read these files, so its rule about ZeRO-2's offload is quoted here.
_DROPS = "no deepspeed from 0.15.2 to 0.18.9, which drops gradients [ds-accumulation-drops-gradients]"
_KEPT = 2  # micro-batches with gradients that these releases keep


def found(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield LLaMA-Factory's levers."""
    yield from levers.micro_batches(run, "micro_batch_size", "gradient_accumulation_steps")
    if not fields.flag(config, f"{_OWN}enable_liger_kernel"):
        yield Lever(
            Kind.FUSED_LOSS, "Liger's kernels with its fused loss", {f"{_OWN}enable_liger_kernel": True}
        )
    if not run.shards_optimizer and not fields.integer(config, f"{_OWN}quantization_bit"):
        drops = f"; {_DROPS}" if run.micro_batches > _KEPT else ""
        for label, preset, faulty in _PRESETS_THAT_OFFLOAD:
            by_hand = _BY_TORCHRUN + (drops if faulty else "")
            yield Lever(Kind.OFFLOAD, label, {"deepspeed": preset}, run.layout.gpus, by_hand=by_hand)
    quantized: dict[str, object] = {f"{_OWN}quantization_bit": 4}
    if run.adapter is None:
        if not run.shards_optimizer:
            yield Lever(Kind.STATES, "8-bit Adam states", {"optimizer": "adamw_bnb_8bit"})
        yield Lever(Kind.ADAPTERS, "QLoRA", {f"{_OWN}finetuning_type": "lora", **quantized})
    elif not fields.integer(config, f"{_OWN}quantization_bit"):
        yield Lever(Kind.QUANTIZED, "QLoRA, the base in 4 bits", quantized)
    yield from levers.sequences(run, f"{_OWN}cutoff_len")
    yield from levers.zero3(config, run)
    if run.weight_shards > 1:
        yield from levers.more_gpus(run)
    elif not run.shards_optimizer and not fields.integer(config, f"{_OWN}quantization_bit"):
        yield from levers.more_gpus(run, {"deepspeed": _PRESET})
