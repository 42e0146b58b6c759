# SPDX-License-Identifier: Apache-2.0
"""Generated DeepSpeed configurations: sparse ones as people write them, and dense ones, most values good and some not.

The fields are those of the configuration classes of any release, so that a field which another release lacks is asked
for too. Batch sizes are numbers for one rank: DeepSpeed does not judge a value filled in by a trainer.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

Kind = tuple[tuple[Any, ...], tuple[Any, ...]]  # fitting values, values that may not fit

BOOL: Kind = ((True, False, "auto", 1, "true"), ("maybe", 2, None, [], 0.5))
PLAIN: Kind = ((True, False), ())
OPTIONAL_BOOL: Kind = ((True, False, None, "auto"), ("cpu", 3, {}))
COUNT: Kind = ((1, 100, 5e8, 1_000_000, "auto", "4", True, 2.0, "2.0"), (-1, 0.5, "many", None, [], 0))
SHARE: Kind = ((0.5, 0.25, 1, 0.1, "auto", "0.5"), (1.5, -0.1, None, "half", 0, 1.0))
DEVICE: Kind = (("cpu", "nvme", "none", "auto"), ("CPU", "disk", None, True))
PATH: Kind = (("/local/nvme", None, "auto"), (5, [], True))
INTERVAL: Kind = (("auto", 4, 8, 2.0), ("4", 0, -1, None, 1.5))
STRATEGY: Kind = (("auto", "step", "epoch"), ("always", None, 1))
STAGE: Kind = ((0, 1, 2, 3, 2, 3, "auto", "2", True), (4, -1, None, "three", 1.5))
ANY: Kind = ((True, False, 1, "x", None), ())


def all_of(kind: Kind, names: str) -> dict[str, Kind]:
    """Return fields of one kind."""
    return dict.fromkeys(names.split(), kind)


OFFLOAD_OPTIMIZER: Mapping[str, Kind] = {
    "device": DEVICE, "nvme_path": PATH, "buffer_count": COUNT, "pin_memory": BOOL, "pipeline_read": BOOL,
    "pipeline_write": BOOL, "fast_init": BOOL, "ratio": SHARE, "super_offload": BOOL, "cpuadam_cores_perc": SHARE,
}  # fmt: skip
OFFLOAD_PARAM: Mapping[str, Kind] = {
    "device": DEVICE, "nvme_path": PATH, "buffer_count": COUNT, "buffer_size": COUNT, "max_in_cpu": COUNT,
    "pin_memory": BOOL,
}  # fmt: skip
ZENFLOW: Mapping[str, Kind] = {
    "topk_ratio": SHARE, "select_strategy": STRATEGY, "select_interval": INTERVAL, "update_interval": INTERVAL,
    "overlap_step": BOOL, "offload": BOOL, "auto_ratio": SHARE, "full_warm_up_rounds": ((0, 2, "auto"), ("x", None)),
    "pt_reserved_cores_perc": SHARE,
}  # fmt: skip
ZERO: Mapping[str, Kind] = {
    **all_of(
        BOOL,
        """
        contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
        load_from_fp32_weights elastic_checkpoint stage3_gather_16bit_weights_on_model_save
        gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
        stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save ignore_unused_parameters
        legacy_stage1 round_robin_gradients parameter_alignment compute_grad_norm zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory mics_hierarchical_params_gather
        """,
    ),
    **all_of(
        OPTIONAL_BOOL,
        """
        overlap_comm cpu_offload cpu_offload_param cpu_offload_use_pin_memory
        """,
    ),
    **all_of(
        COUNT,
        """
        reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
        max_live_parameters stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_reuse_distance zero_hpz_partition_size
        """,
    ),
    "mics_shard_size": ((-1, 8), ()),
    "zeropp_loco_param": (({"err_beta": 0.8, "reset_T": 1024}, None), ()),
    "leaf_module": (({}, {"classes": ["Block"]}), ("x", {"class": []})),
}  # fmt: skip
COMPILE: Mapping[str, Kind] = {
    **all_of(
        BOOL,
        """
        deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory
        offload_opt_states double_buffer symmetric_memory debug_log offload_parameters
        keep_int_input_tensors keep_all_input_tensors
        """,
    ),
    "free_activation_threshold": ((1, 1024, "auto"), ("x", None)),
    "passes": ((["z1"], ["z3", "autosp"], None, "auto"), (["zero3"], ["autotp"], "z3")),
}
PRECISION: Mapping[str, Kind] = {"enabled": BOOL}
BF16 = {
    **PRECISION,
    "bf16_master_weights_and_grads": BOOL,
    "bf16_optimizer_states": BOOL,
    "immediate_grad_update": BOOL,
}
FP16 = {**PRECISION, "fp16_master_weights_and_grads": BOOL, "auto_cast": BOOL}
OFF = {"enabled": False}
REMOVED: Mapping[str, Any] = {
    **dict.fromkeys(("nebula", "amp", "eigenvalue", "elasticity", "curriculum_learning"), OFF),
    "progressive_layer_drop": OFF,
    "compression_training": {},
    "quantize_training": {},
    "sparse_gradients": False,
    "graph_harvesting": False,
    "sparse_attention": {"mode": "fixed"},
}
TYPOS = ("fraction", "pipeline", "offload_params", "pin_memmory", "cpu_offload_params", "devices", "stages")
NO_SECTION = (True, "cpu", 3, [])


class Generator:
    """Makes configurations from a seed; the same seed makes the same ones.

    Without `checks_precision` the release takes any value in `bf16` and `fp16`, and asks only whether it is true.
    """

    def __init__(self, seed: int, *, checks_precision: bool = True) -> None:
        self._random = random.Random(seed)
        self._bf16, self._fp16 = (
            section if checks_precision else dict.fromkeys(section, PLAIN) for section in (BF16, FP16)
        )

    def next(self) -> dict[str, Any]:
        """Return one configuration; a third of them have a handful of keys."""
        dense = self._random.random() < 0.66
        made = self._batch()
        zero = self._zero(dense)
        if zero is not None:
            made["zero_optimization"] = zero
        self._maybe(made, 0.5, "bf16", lambda: self._section(self._bf16, 2))
        self._maybe(made, 0.25, "fp16", lambda: self._section(self._fp16, 2))
        self._maybe(made, 0.25 if dense else 0.05, "compile", lambda: self._section(COMPILE, 3))
        self._maybe(made, 0.15, "optimizer", lambda: {"type": "AdamW", "params": {"lr": 1e-4}})
        self._maybe(made, 0.15, "activation_checkpointing", lambda: {"cpu_checkpointing": True, "typo": 1})
        self._maybe(
            made, 0.1, "aio", lambda: self._random.choice([{"block_size": 1048576}, {"depth": 1}, None])
        )
        self._maybe(made, 0.1, "gradient_allreduce_op", lambda: self._random.choice(["mean", "sum"]))
        self._maybe(made, 0.1, "gradient_clipping", lambda: self._random.choice([1.0, 0.0, "auto"]))
        self._maybe(made, 0.05, "offload_optimizer", lambda: {"device": "cpu"})
        for name, value in REMOVED.items():
            self._maybe(made, 0.004, name, lambda value=value: value)
        return made

    def _batch(self) -> dict[str, Any]:
        micro, steps = self._random.choice([1, 2, 4]), self._random.choice([1, 1, 4])
        product = micro * steps
        total = product + (product > 1 and self._random.random() < 0.03)  # a multiple needs more ranks
        full = {
            "train_batch_size": total,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        return full if self._random.random() < 0.5 else {"train_micro_batch_size_per_gpu": micro}

    def _zero(self, dense: bool) -> Any:
        drawn = self._random.random()
        if drawn < 0.05:
            return self._random.choice([None, True, False, "auto", 2]) if drawn < 0.02 else None
        zero = self._section(ZERO, self._random.randrange(6) if dense else self._random.randrange(2))
        if isinstance(zero, dict):
            self._maybe(zero, 0.93, "stage", lambda: self._value(STAGE))
            self._maybe(zero, 0.7, "offload_optimizer", lambda: self._section(OFFLOAD_OPTIMIZER, 3, "device"))
            self._maybe(zero, 0.4, "offload_param", lambda: self._section(OFFLOAD_PARAM, 3, "device"))
            self._maybe(zero, 0.15 if dense else 0.05, "zenflow", lambda: self._section(ZENFLOW, 3))
        return zero

    def _section(self, fields: Mapping[str, Kind], most: int, usual: str = "") -> Any:
        if self._random.random() < 0.015:
            return self._random.choice(NO_SECTION)
        names = self._random.sample(sorted(fields), min(len(fields), self._random.randrange(most + 1)))
        if usual and self._random.random() < 0.85:
            names.append(usual)
        section = {name: self._value(fields[name]) for name in names}
        if self._random.random() < 0.02:
            section[self._random.choice(TYPOS)] = True
        return section

    def _value(self, kind: Kind) -> Any:
        good, other = kind
        return self._random.choice(other if other and self._random.random() < 0.05 else good)

    def _maybe(self, section: dict[str, Any], chance: float, name: str, value: Callable[[], Any]) -> None:
        if self._random.random() < chance:
            section[name] = value()
