# SPDX-License-Identifier: Apache-2.0
"""Writes the names accepted by the argument classes of transformers and TRL into the vocabulary, asked of the real
classes.

    python tests/judges/transformers/vocabulary.py

`transformers.txt` has every name that some fetched release accepts in a recipe, `transformers_classes.txt` the fields
of each class. A field that only some releases of transformers have is a key with `exists` in
`keys/transformers.yaml`; `test_against_trainer.py` holds it to the classes.
"""

from pathlib import Path

from trainer_releases import Release, installed

FOLDER = Path(__file__).parents[3] / "skill_tools" / "knowledge" / "vocabulary"
TRAINER = ["transformers.training_args", "transformers.training_args_seq2seq"]
TRAINERS = ["sft", "dpo", "grpo", "rloo", "kto", "reward", "distillation"]
EXPERIMENTAL = [
    "cpo",
    "orpo",
    "gkd",
    "gold",
    "online_dpo",
    "sdft",
    "sdpo",
    "tpo",
    "a2po",
    "gmpo",
    "async_grpo",
]
TRL = [
    *(f"trl.trainer.{name}_config" for name in TRAINERS),
    *(f"trl.experimental.{name}.{name}_config" for name in EXPERIMENTAL),
    "trl.trainer.model_config",
    "trl.scripts.utils",
]
BASE = "TrainingArguments"
# The Trainer reads these names of `fsdp_config`; `_process_fsdp_args` of one release or another asks for each.
FSDP_CONFIG = [
    "activation_checkpointing", "auto_wrap_policy", "backward_prefetch", "cpu_offload", "cpu_ram_efficient_loading",
    "forward_prefetch", "limit_all_gathers", "min_num_params", "reshard_after_forward", "state_dict_type",
    "sync_module_states", "transformer_layer_cls_to_wrap", "use_orig_params", "version", "xla", "xla_fsdp_grad_ckpt",
    "xla_fsdp_settings.*", "xla_fsdp_v2",
]  # fmt: skip
# Names of other frameworks that people write there; each has a rule that says so.
FOREIGN = [
    "activation_checkpointing_offload", "activation_cpu_offload", "cpu_offload_pin_memory", "offload_params",
    "sharding_strategy",
]  # fmt: skip
# `TrlParser` reads the first two itself; the next two are names of older releases that recipes still have.
OF_A_RECIPE = [
    "env.*", "config", "max_seq_length", "evaluation_strategy", "gradient_checkpointing_kwargs.*",
    "activation_checkpointing_kwargs.*",
]  # fmt: skip
OF_A_DATA_SET = "DatasetConfig"  # an entry of the list `datasets`


def collect() -> dict[str, set[str]]:
    """Return the fields of each class, of all fetched releases together."""
    found: dict[str, set[str]] = {}
    for version in installed():
        newest = version == installed()[-1]
        with Release(version) as running:
            for name, fields in running.ask({"fields": [*TRAINER, *(TRL if newest else [])]}).items():
                found.setdefault(name, set()).update(fields)
    return {name: fields for name, fields in found.items() if not name.startswith("_")}


def texts(classes: dict[str, set[str]]) -> dict[str, str]:
    """Return the content of both files."""
    every = set().union(*(fields for name, fields in classes.items() if name != OF_A_DATA_SET))
    names = sorted({*every, *OF_A_RECIPE, *(f"fsdp_config.{name}" for name in [*FSDP_CONFIG, *FOREIGN])})
    of_classes = sorted(
        f"{name}.{field}"
        for name, fields in classes.items()
        for field in (fields if name == BASE else fields - classes[BASE])
    )
    head = "# Written by tests/judges/transformers/vocabulary.py from the argument classes of transformers and TRL.\n"
    return {
        "transformers.txt": head + "\n".join(names) + "\n",
        "transformers_classes.txt": head
        + f"# The classes of trainers have the fields of {BASE} too.\n"
        + "\n".join(of_classes)
        + "\n",
    }


if __name__ == "__main__":
    for name, text in texts(collect()).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
