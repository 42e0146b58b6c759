# SPDX-License-Identifier: Apache-2.0
"""The levers of Axolotl beside offloading: its batch, its kernels, its optimizers, quantized adapters, ZeRO-3's shards.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, levers
from skill_tools.dialects.axolotl.run import fuses_loss, packs_experts, shard_stage
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.transformers.experts import are_fused

_LIGER = "axolotl.integrations.liger.LigerPlugin"
_PRESET = "deepspeed_configs/zero3_bf16.json"
# The way in which Axolotl shards matrices of Muon, refused under DeepSpeed.
_FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
}


def found(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield Axolotl's levers; QLoRA in place of full training as its own examples set it up."""
    yield from levers.micro_batches(run, "micro_batch_size", "gradient_accumulation_steps")
    if not fuses_loss(config):
        plugins = [*fields.words(config, "plugins"), _LIGER]
        settings = {"plugins": list(dict.fromkeys(plugins)), "liger_fused_linear_cross_entropy": True}
        yield Lever(Kind.FUSED_LOSS, "Liger's fused linear cross entropy", settings)
    sharded = shard_stage(config)
    optimizer = fields.text(config, "optimizer") or "adamw_torch_fused"
    if run.adapter is None and not sharded and "adamw" in optimizer:
        yield Lever(Kind.STATES, "8-bit Adam states", {"optimizer": "adamw_bnb_8bit"})
    experts = _packed_experts(config, run)
    if run.adapter is None:
        adapters = {"lora_r": 16, "lora_alpha": 32, **(experts or {"lora_target_linear": True})}
        yield Lever(Kind.ADAPTERS, "QLoRA", {"adapter": "qlora", "load_in_4bit": True, **adapters})
    elif fields.flag(config, "load_in_4bit"):
        if experts:
            yield Lever(Kind.QUANTIZED, "the experts in 4 bits too", experts)
    else:
        four: dict[str, object] = {"adapter": "qlora", "load_in_4bit": True, **experts}
        if fields.flag(config, "load_in_8bit"):
            four["load_in_8bit"] = False
        yield Lever(Kind.QUANTIZED, "QLoRA, the base in 4 bits", four)
    yield from levers.sequences(run, "sequence_len")
    if run.adapter is not None and not sharded and not fields.flag(config, "layer_offloading"):
        yield Lever(Kind.STREAMED, "frozen layers streamed", {"layer_offloading": True})
    yield from levers.zero3(config, run)
    if sharded >= 3:
        yield from levers.more_gpus(run)
    elif not sharded and not fields.flag(config, "load_in_8bit"):
        yield from levers.more_gpus(run, _FSDP2 if optimizer.startswith("muon") else {"deepspeed": _PRESET})


def _packed_experts(config: Config, run: TrainingRun) -> dict[str, object]:
    """Return the settings that quantize experts that bitsandbytes leaves out; all linears are then no target."""
    if packs_experts(config) or not are_fused(config, run.shape):
        return {}
    settings: dict[str, object] = {"quantize_moe_experts": True}
    all_linears = fields.flag(config, "lora_target_linear")
    if all_linears:
        settings["lora_target_linear"] = False
    if all_linears or run.adapter is None:
        settings["lora_target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return settings
