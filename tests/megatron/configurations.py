# SPDX-License-Identifier: Apache-2.0
"""Configurations to judge: the offload keys, and every key that their checks read, in any combination.

Keys unknown to a release are left out. Now and then one offload key is too new: the rules must see it as well. The
other values that a drawn value needs to be valid (a dtype for a pipeline, a method for full recomputation) are added,
so that most configurations get as far as the checks on offloading.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from skill_tools.configs.keys import Key
from skill_tools.rules.versions import admits

Fields = dict[str, Any]

OFFLOAD_MODULES = [
    "core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear",
    "fused_group_mlp", "gdp_qkv", "linear_fc1",
]  # fmt: skip
NEW_RECOMPUTE_MODULES = {"mhc": ">=0.20", "gdp_in_proj": ">=0.20"}
GRAPH_MODULES = ["attn", "mlp", "moe", "moe_router", "full_iteration"]

OFFLOAD = {
    "cpu_offloading": st.sampled_from([True, True, False]),
    "cpu_offloading_num_layers": st.integers(-1, 6),
    "cpu_offloading_activations": st.booleans(),
    "cpu_offloading_weights": st.booleans(),
    "cpu_offloading_double_buffering": st.booleans(),
    "cpu_offloading_retain_pinned_cpu_buffers": st.booleans(),
    "fine_grained_activation_offloading": st.sampled_from([True, True, False]),
    "offload_modules": st.none()
    | st.lists(st.sampled_from(OFFLOAD_MODULES), unique=True, max_size=3)
    | st.sampled_from([["moe_act"], ["core_attn"], ["attn_proj"], ["expert_fc1"], ["gdp_qkv"]]),
    "min_offloaded_tensor_size": st.sampled_from([-1, 0, 1024, 1048576]),
    "delay_offload_until_cuda_graph": st.booleans(),
    "delta_offload_bytes_across_pp_ranks": st.sampled_from([-1, 0, 1048576]),
    "activation_offload_fraction": st.sampled_from([-0.5, 0.0, 0.5, 1.0, 1.5]),
    "fine_grained_offloading_max_inflight_offloads": st.sampled_from([None, -1, 0, 1]),
    "moe_paged_stash": st.booleans(),
}
BESIDE = {
    "pipeline_model_parallel_size": st.sampled_from([1, 1, 2]),
    "recompute_granularity": st.sampled_from([None, None, "selective", "full"]),
    "recompute_modules": st.none()
    | st.lists(
        st.sampled_from(["core_attn", "layernorm", "moe", "mhc", "gdp_in_proj"]), unique=True, max_size=2
    ),
    "cuda_graph_impl": st.sampled_from(["none", "none", "local", "transformer_engine", "full_iteration"]),
    "cuda_graph_scope": st.sampled_from([None, "full", "attn", "full_iteration", ["attn"], ["moe_router"]]),
    "cuda_graph_modules": st.none() | st.lists(st.sampled_from(GRAPH_MODULES), unique=True, max_size=2),
    "cuda_graph_warmup_steps": st.sampled_from([0, 1, 3]),
    "enable_cuda_graph": st.sampled_from([False, False, True]),
    "external_cuda_graph": st.sampled_from([False, False, True]),
    "num_moe_experts": st.sampled_from([None, 4]),
    "moe_expert_rank_capacity_factor": st.sampled_from([None, 1.5]),
    "use_transformer_engine_op_fuser": st.booleans(),
    "overlap_moe_expert_parallel_comm": st.booleans(),
    "moe_token_dispatcher_type": st.sampled_from(["alltoall", "flex"]),
    "moe_flex_dispatcher_backend": st.sampled_from(["deepep", "hybridep", "ncclep"]),
    "mtp_num_layers": st.sampled_from([None, 1]),
}
OPTIMIZER = {
    "optimizer_cpu_offload": st.sampled_from([True, True, False]),
    "optimizer_offload_fraction": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    "use_torch_optimizer_for_cpu_offload": st.booleans(),
    "overlap_cpu_optimizer_d2h_h2d": st.booleans(),
    "pin_cpu_grads": st.booleans(),
    "pin_cpu_params": st.booleans(),
    "decoupled_weight_decay": st.booleans(),
    "optimizer": st.sampled_from(["adam", "adam", "sgd", "muon"]),
    "use_precision_aware_optimizer": st.booleans(),
    "use_distributed_optimizer": st.booleans(),
    "main_grads_dtype": st.sampled_from(["fp32", "bf16"]),
    "main_params_dtype": st.sampled_from(["fp32", "fp16"]),
    "exp_avg_dtype": st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
    "exp_avg_sq_dtype": st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
    "store_param_remainders": st.booleans(),
    "optimizer_cuda_graph": st.booleans(),
}


# Flags that no release has and people write.
WRONG_FLAGS = [
    "--cpu-offloading",
    "--cpu-offloading-activations",
    "--cpu-offloading-weights",
    "--cpu-offloading-double-buffering",
    "--pin-cpu-grads",
    "--pin-cpu-params",
    "--overlap-cpu-optimizer-h2d-d2h",
    "--offload-optimizer-states",
    "--optimizer-cpu",
]
COMMAND_LINE = {
    "cpu_offloading_num_layers": st.integers(-1, 6),
    "fine_grained_activation_offloading": st.sampled_from([True, True, False]),
    "offload_modules": st.sampled_from([["core_attn"], ["moe_act"], ["attn_proj"], ["linear_fc1"]]),
    "activation_offload_fraction": st.sampled_from([0.5, 1.0, 1.5]),
    "moe_paged_stash": st.booleans(),
    "transformer_impl": st.sampled_from(["transformer_engine", "transformer_engine", "local"]),
    "recompute_granularity": st.sampled_from(["selective", "full"]),
    "recompute_activations": st.booleans(),
    "cuda_graph_impl": st.sampled_from(["none", "local", "transformer_engine"]),
    "cuda_graph_scope": st.sampled_from(["attn", "full_iteration"]),
    "external_cuda_graph": st.booleans(),
    "pipeline_model_parallel_size": st.sampled_from([1, 2]),
    "optimizer_cpu_offload": st.sampled_from([True, True, False]),
    "optimizer_offload_fraction": st.sampled_from([0.5, 1.0]),
    "use_precision_aware_optimizer": st.booleans(),
    "use_distributed_optimizer": st.sampled_from([True, True, False]),
    "main_grads_dtype": st.sampled_from(["fp32", "bf16"]),
    "exp_avg_dtype": st.sampled_from(["fp32", "fp16", "fp8"]),
    "optimizer": st.sampled_from(["adam", "sgd"]),
    "fp8": st.just("hybrid"),
    "fp8_recipe": st.sampled_from(["delayed", "tensorwise"]),
    "fp8_param_gather": st.booleans(),
    "env.NVTE_CPU_OFFLOAD_V1": st.sampled_from(["1", "1", "0"]),
}

# Where a drawn script starts, as with STARTS.
SCRIPTS: list[Fields] = [
    {},
    {"cpu_offloading_num_layers": 2},
    {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
        "env.NVTE_CPU_OFFLOAD_V1": "1",
    },
    {
        "optimizer_cpu_offload": True,
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
    },
    {
        "optimizer_cpu_offload": True,
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
        "fp8": "hybrid",
        "fp8_param_gather": True,
    },
]

LAYER_LEVEL: Fields = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
FINE_GRAINED: Fields = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["moe_act"],
    "num_moe_experts": 4,
}

# The start of a drawing: nothing, or one mechanism switched on. Drawn values win over these.
STARTS: list[Fields] = [
    {},
    LAYER_LEVEL,
    LAYER_LEVEL | {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
    {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
    FINE_GRAINED,
    {"moe_paged_stash": True, "moe_expert_rank_capacity_factor": 1.5, "num_moe_experts": 4},
    FINE_GRAINED | {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router"]},
    FINE_GRAINED | {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe"]},
    FINE_GRAINED | {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]},
    FINE_GRAINED | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    FINE_GRAINED | {"recompute_granularity": "selective", "recompute_modules": ["mhc"]},
    FINE_GRAINED
    | {"overlap_moe_expert_parallel_comm": True, "moe_flex_dispatcher_backend": "ncclep"}
    | {"offload_modules": ["expert_fc1"]},
    FINE_GRAINED
    | {"recompute_granularity": "selective", "recompute_modules": ["gdp_in_proj"]}
    | {"offload_modules": ["gdp_qkv"]},
]


def exists(key: Key, release: str) -> bool:
    """Return whether megatron-core `release` has `key`."""
    return all(admits(range_, release) for name, range_ in key.exists.items() if name == "megatron-core")


@st.composite
def transformer_fields(draw: st.DrawFn, keys: Mapping[str, Key], release: str) -> Fields:
    """Draw the fields of one TransformerConfig for `release`."""
    known = {name: values for name, values in (OFFLOAD | BESIDE).items() if exists(keys[name], release)}
    too_new = [name for name in OFFLOAD if name not in known]
    fields: Fields = {"num_layers": draw(st.integers(2, 5)), "hidden_size": 64, "num_attention_heads": 4}
    fields |= draw(st.sampled_from([start for start in STARTS if start.keys() <= known.keys()]))
    names = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=6))
    fields |= {name: draw(known[name]) for name in names}
    if too_new and draw(st.integers(0, 19)) == 7:
        name = draw(st.sampled_from(too_new))
        fields[name] = draw(OFFLOAD[name])
    if fields.get("recompute_modules"):
        fields["recompute_modules"] = [
            module
            for module in fields["recompute_modules"]
            if admits(NEW_RECOMPUTE_MODULES.get(module, ">=0"), release)
        ]
    return fields | surroundings(fields, release)


@st.composite
def optimizer_fields(draw: st.DrawFn, keys: Mapping[str, Key], release: str) -> Fields:
    """Draw the fields of one OptimizerConfig for `release`."""
    known = sorted(name for name in OPTIMIZER if exists(keys[name], release))
    names = draw(st.lists(st.sampled_from(known), unique=True, max_size=10))
    return {"lr": 1e-4} | {name: draw(OPTIMIZER[name]) for name in names}


@st.composite
def command_line_fields(draw: st.DrawFn, keys: Mapping[str, Key], release: str) -> Fields:
    """Draw the keys and values of a Megatron-LM launch script of `release`, environment included."""
    known = {
        name: values
        for name, values in COMMAND_LINE.items()
        if name.startswith("env.") or exists(keys[name], release)
    }
    too_new = sorted(COMMAND_LINE.keys() & OFFLOAD.keys() - known.keys())
    names = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=6))
    fields = draw(st.sampled_from([start for start in SCRIPTS if start.keys() <= known.keys()]))
    fields = fields | {name: draw(known[name]) for name in names}
    if too_new and draw(st.integers(0, 19)) == 7:
        name = draw(st.sampled_from(too_new))
        fields[name] = draw(COMMAND_LINE[name])
    if draw(st.integers(0, 19)) == 7:
        fields[draw(st.sampled_from(WRONG_FLAGS))] = True
    if fields.get("recompute_granularity") == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return fields


def surroundings(fields: Fields, release: str) -> Fields:
    """Return the values that the drawn ones need to be valid in every other respect."""
    needed: Fields = {"add_bias_linear": False}
    if fields.get("pipeline_model_parallel_size", 1) > 1:
        needed["pipeline_dtype"] = "bf16"
    if fields.get("recompute_granularity") == "full":
        needed |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if "mhc" in (fields.get("recompute_modules") or []) and admits(">=0.20", release):
        needed["enable_mhc_connections"] = True
    if fields.get("moe_expert_rank_capacity_factor") is not None:
        needed |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
        needed |= {"use_transformer_engine_op_fuser": True, "num_moe_experts": 4}
    elif fields.get("moe_flex_dispatcher_backend") == "ncclep":
        needed["moe_token_dispatcher_type"] = "flex"
    if fields.get("overlap_moe_expert_parallel_comm"):
        needed |= {"num_moe_experts": 4, "expert_model_parallel_size": 2, "bf16": True}
        needed.setdefault("moe_token_dispatcher_type", fields.get("moe_token_dispatcher_type", "alltoall"))
    if "moe" in (fields.get("cuda_graph_modules") or []):
        needed |= {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0}
        needed |= {"moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"}
    if "moe_router" in (fields.get("cuda_graph_modules") or []):
        needed["num_moe_experts"] = 4
    return needed
