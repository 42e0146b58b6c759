# SPDX-License-Identifier: Apache-2.0
"""The key table: complete for the rules, in the frameworks' spelling, without contradictions."""

import re

import pytest
from for_each import for_each
from packaging.specifiers import SpecifierSet
from shipped import KEY_ENTRIES
from shipped import KEYS as KEYS_BY_NAME

from skill_tools import knowledge
from skill_tools.bundle import knowledge_path
from skill_tools.configs.keys import Key, key_table, keys_from_data, load_keys
from skill_tools.configs.values import typed
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects import registry

FRAMEWORKS = [dialect.name for dialect in registry.with_files()]

KEYS = tuple(KEYS_BY_NAME.values())
TABLE = key_table(KEYS)
FIELDS = {
    "key", "mechanism", "type", "unit", "choices", "spelling", "aliases", "default", "recipe_sets", "exists", "implies",
    "note", "outside", "planned",
}  # fmt: skip
TYPES = {"bool", "int", "float", "str", "dtype", "list", "dict", "any"}
OFFLOAD_KEYS = {
    "cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights",
    "cpu_offloading_double_buffering", "cpu_offloading_retain_pinned_cpu_buffers",
    "fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size",
    "delay_offload_until_cuda_graph", "delta_offload_bytes_across_pp_ranks", "activation_offload_fraction",
    "fine_grained_offloading_max_inflight_offloads", "moe_paged_stash", "moe_paged_stash_page_size",
    "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu",
    "optimizer_cpu_offload", "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params", "decoupled_weight_decay",
    "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "store_param_remainders", "use_distributed_optimizer", "optimizer.fp8_recipe", "optimizer_cuda_graph",
    "chunked_optimizer_state_offload", "optimizer_state_offload_chunk_size_mb", "optimizer_state_offload_fraction",
    "offload_optimizer_states", "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading",
    "selective_checkpointing", "selective_checkpointing.offload", "layer_offloading", "ple_cpu_offload",
    "relora_cpu_offload", "fsdp_config.offload_params", "fsdp_config.cpu_offload_pin_memory",
    "fsdp_config.cpu_ram_efficient_loading", "deepspeed", "deepspeed.zero_optimization.offload_optimizer.device",
    "deepspeed.zero_optimization.offload_param.device",
}  # fmt: skip


def test_every_offload_key_is_there_once() -> None:
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names))
    assert set(names) >= OFFLOAD_KEYS


@for_each(KEY_ENTRIES, lambda entry: entry["key"])
def test_an_entry_says_nothing_that_is_not_read(entry: dict[str, object]) -> None:
    assert set(entry) <= FIELDS
    types = entry["type"]
    assert set(types.values() if isinstance(types, dict) else [types]) <= TYPES


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_spelling_names_one_key(framework: str) -> None:
    spellings = [key.spelling[framework] for key in KEYS if framework in key.spelling]
    spellings += [alias for key in KEYS for alias in key.aliases.get(framework, ())]
    assert len(spellings) == len(set(spellings))


@for_each(KEYS, lambda key: key.name)
def test_spellings_have_the_form_of_their_framework(key: Key) -> None:
    for flag in (*key.negatives, *filter(None, [key.spelling.get("megatron-lm")])):
        assert re.fullmatch(r"--[a-z][\w-]*", flag, re.IGNORECASE)
    for framework in ("megatron-bridge", "axolotl"):
        if framework in key.spelling:
            assert re.fullmatch(r"[a-z]\w*(\.\w+)*|--[a-z_]+", key.spelling[framework])


@for_each(KEYS, lambda key: key.name)
def test_defaults_fit_the_type_and_ranges_are_specifiers(key: Key) -> None:
    for specifier in key.exists.values():
        SpecifierSet(specifier)
    for framework, stated in key.default.items():
        is_history = isinstance(stated, list) and stated and isinstance(stated[0], dict)
        for period in stated if is_history else [{"versions": {}, "value": stated}]:  # type: ignore[union-attr]
            assert (
                typed(key, period["value"], framework, converts_text=framework != "megatron-bridge").expected
                is None
            )
            for specifier in period["versions"].values():
                SpecifierSet(specifier)


@for_each([key for key in KEYS if key.implies], lambda key: key.name)
def test_what_a_value_stands_for_is_made_of_known_keys(key: Key) -> None:
    for fields in key.implies.values():
        for field, value in fields.items():
            assert typed(TABLE.by_name[field], value, "megatron-bridge", converts_text=False).expected is None


def test_the_index_has_the_keys_as_the_files_spell_them() -> None:
    assert dict(load_keys()) == KEYS_BY_NAME


def test_the_index_has_the_names_of_every_file_sorted() -> None:
    files = sorted(knowledge_path("vocabulary").glob("*.txt"))
    assert len(files) >= 30
    for path in files:
        written = knowledge.words(path.read_text(encoding="utf-8"))
        spelt = TABLE.by_spelling.get(path.stem.replace("_", "-"), {})
        kept = knowledge.names(path.stem)
        assert list(kept) == sorted(name for name in written if name in set(kept)), path.name
        assert set(written) - set(kept) <= spelt.keys(), path.name
    assert knowledge.folded(["a.b", "a.c", "a", "", "x" * 56, "y"]).split("\n") == [
        "#a.b", "$c", "%", "$", f"#{'x' * 56}", "!y",
    ]  # fmt: skip
    assert knowledge.folded(["--a-b", "--a-c_d", "--a"]).split("\n") == ["#-a_b", "&-a-c_d", "'"]
    assert knowledge.names("no_such_framework") == ()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_frameworks_own_names_contain_every_spelling(framework: str) -> None:
    """The names were taken from the frameworks' sources apart from the keys: one checks the other."""
    file = knowledge_path("vocabulary", f"{framework.replace('-', '_')}.txt")
    names = set(knowledge.words(file.read_text(encoding="utf-8")))
    free = {name.removesuffix(".*") for name in names if name.endswith(".*")}
    spellings = {
        key.spelling[framework].lstrip("+")
        for key in KEYS
        if framework in key.spelling and not _is_elsewhere(key) and "nobody writes it" not in key.note
    }
    below_free = {name for name in spellings if any(name.startswith(f"{section}.") for section in free)}
    assert spellings - names - below_free == set()


def _is_elsewhere(key: Key) -> bool:
    """Only on the development branch, or an option of a launch program."""
    is_development = "megatron-core-dev" in key.exists or "development branch" in key.note
    return is_development or key.name == "activation_offload_layers"


def test_two_facts_about_one_fraction() -> None:
    fraction = TABLE.by_name["optimizer_offload_fraction"]
    assert fraction.default["megatron-bridge"] == 0.0
    assert fraction.default["megatron-lm"] == 1.0
    weights = TABLE.by_name["cpu_offloading_weights"].default["megatron-bridge"]
    assert [period["value"] for period in weights] == [True, False]  # type: ignore[attr-defined]
    assert TABLE.by_name["min_offloaded_tensor_size"].unit == "elements"
    assert TABLE.by_negative["--no-pin-cpu-grads"].name == "pin_cpu_grads"


def test_a_type_may_differ_by_dialect() -> None:
    (key,) = keys_from_data(
        [{"key": "bf16", "mechanism": "precision", "type": {"default": "bool", "axolotl": "any"}}]
    )
    assert (key.type_in("megatron-bridge"), key.type_in("axolotl")) == ("bool", "any")


@pytest.mark.parametrize(
    ("framework", "written", "nearest"),
    [
        ("megatron-bridge", "model.cpu_offload", "model.cpu_offloading"),
        ("megatron-bridge", "optimizer.cpu_offloading", "model.cpu_offloading"),
        ("megatron-lm", "--overlap-cpu-optimizer-h2d-d2h", "--overlap-cpu-optimizer-d2h-h2d"),
        ("axolotl", "context_parapllel_size", "context_parallel_size"),
    ],
)
def test_the_nearest_name_comes_first(framework: str, written: str, nearest: str) -> None:
    names = load_vocabulary(framework)
    assert not names.accepts(written)
    assert names.nearest(written)[0] == nearest


def test_free_sections_accept_anything_below_them() -> None:
    names = load_vocabulary("axolotl")
    assert names.accepts("gradient_checkpointing_kwargs.use_reentrant")
    assert not names.accepts("fsdp_config.anything")
