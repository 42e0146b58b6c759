"""Axolotl configurations for hypothesis: the offload keys, and every key that decides about them.

Each is a plain mapping as Axolotl reads it from YAML. Values are valid or wrong on purpose; keys that only make
a configuration complete (datasets, batch size) are the same in all of them.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

COMPLETE: dict[str, Any] = {
    "base_model": "Qwen/Qwen3-8B",
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "learning_rate": 0.00001,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "sequence_len": 512,
}

SWITCH = st.booleans()

ADAPTERS = st.sampled_from(
    [
        {},
        {},
        {"adapter": "lora"},
        {"adapter": "lora", "load_in_8bit": True},
        {"adapter": "lora", "load_in_4bit": False},
        {"adapter": "qlora", "load_in_4bit": True},
    ]
)

TRAINERS = st.sampled_from(
    [{}] * 8
    + [{"rl": name} for name in ("dpo", "ipo", "orpo", "simpo")]
    + [
        {"rl": "kto", "remove_unused_columns": False},
        {"rl": "ebft", "ebft": {"mode": "structured"}},
        {"rl": "ebft", "ebft": {"mode": "strided"}},
        {"rl": "ebft", "ebft": {"mode": "strided"}, "attn_implementation": "flex_attention"},
        {"rl": "ebft", "ebft": {"mode": "strided"}, "flex_attention": True},
        {"reward_model": True},
    ]
)

FSDP_CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "offload_params": SWITCH,
        "fsdp_offload_params": SWITCH,
        "cpu_offload_pin_memory": SWITCH,
        "cpu_ram_efficient_loading": SWITCH,
        "fsdp_cpu_ram_efficient_loading": SWITCH,
        "activation_checkpointing": SWITCH,
        "fsdp_version": st.sampled_from([1, 2]),
    },
).filter(
    lambda section: (
        not {"offload_params", "fsdp_offload_params"} <= section.keys()
        and not {"cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"} <= section.keys()
    )
)

DEEPSPEED = st.sampled_from(
    ["deepspeed_configs/zero1.json", "deepspeed_configs/zero3_bf16.json", {"zero_optimization": {"stage": 3}}]
)

SHARDING = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"deepspeed": DEEPSPEED}, optional={"fsdp": st.just(["full_shard"])}),
    st.fixed_dictionaries(
        {"fsdp_config": FSDP_CONFIG},
        optional={
            "fsdp_version": st.sampled_from([None, 1, 2]),
            "deepspeed": DEEPSPEED,
            "fsdp": st.just(["full_shard"]),
        },
    ),
)

SELECTIVE = st.one_of(
    SWITCH,
    st.fixed_dictionaries(
        {},
        optional={
            "save": st.lists(
                st.sampled_from(["attention", "aten::mm", "mm", "addmm", "aten", "exp"]), max_size=3
            ),
            "offload": SWITCH,
        },
    ),
)

OFFLOADING = st.fixed_dictionaries(
    {},
    optional={
        "gradient_checkpointing": st.sampled_from(
            [True, True, True, False, "offload", "offload_disk", "unsloth"]
        ),
        "gradient_checkpointing_kwargs": st.fixed_dictionaries({"use_reentrant": SWITCH}),
        "activation_offloading": st.sampled_from([True, False, "legacy", "disk", "hidden_states"]),
        "selective_checkpointing": SELECTIVE,
        "layer_offloading": SWITCH,
        "ple_cpu_offload": SWITCH,
        "relora_cpu_offload": SWITCH,
        "unfrozen_parameters": st.just(["^lm_head.weight$"]),
        "torch_compile": SWITCH,
        "model_quantization_config": st.just("Mxfp4Config"),
        "optimizer": st.sampled_from(["adamw_torch", "adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit"]),
    },
)

RELORA = st.sampled_from([{}, {}, {}, {"relora": True, "jagged_restart_steps": 10, "adapter": "lora"}])


def configurations() -> SearchStrategy[dict[str, Any]]:
    """Draw a whole configuration: each part on its own, so that every pair of keys meets."""
    parts = st.tuples(OFFLOADING, RELORA, ADAPTERS, TRAINERS, SHARDING)
    return parts.map(
        lambda drawn: {**COMPLETE, **{key: value for part in drawn for key, value in part.items()}}
    )
