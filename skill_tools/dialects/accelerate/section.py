# SPDX-License-Identifier: Apache-2.0
"""Writes Accelerate's input into the draft of its trainer: file, launcher options, environment.

Options win over the file. The launcher takes other fields from the environment that it inherits. It writes
all of this into the environment of the training process, where the plugins of Accelerate read it. `settle` does as the
plugins do: it decides the section that counts, the refused values, and the form of DeepSpeed's JSON. The
draft has to embed `accelerate` and `deepspeed`. Facts: commands/launch.py, utils/launch.py and utils/dataclasses.py of
accelerate 1.13.0 to 1.15.0.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from skill_tools import knowledge
from skill_tools.configs.config import Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.values import UNREADABLE, whole_number
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.accelerate import ACCELERATE, DEEPSPEED

TYPE = "accelerate.distributed_type"
FSDP = "accelerate.fsdp_config."
MEGATRON = "accelerate.megatron_lm_config."

_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_ACTIVE = {"FSDP": FSDP, "DEEPSPEED": DEEPSPEED, "MEGATRON_LM": MEGATRON}
_NUMBERED = frozenset({"fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_state_dict_type"})
_TRUTHS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}  # utils/environment.py::str_to_bool
_PARSED = frozenset(
    {"fsdp_version", "fsdp_min_num_params", "zero_stage", "gradient_accumulation_steps", "gradient_clipping"}
)  # options that the launcher's own parser brings to a type
_OF_VERSION_1 = frozenset(
    {"fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_forward_prefetch", "fsdp_sharding_strategy"}
)
_READ_AS_TRUTH = frozenset(
    {
        *("fsdp_offload_params", "fsdp_activation_checkpointing", "fsdp_cpu_ram_efficient_loading"),
        *("fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_forward_prefetch"),
    }
)
_INHERITED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": f"{DEEPSPEED}zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": f"{DEEPSPEED}offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": f"{DEEPSPEED}offload_param_device",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": f"{DEEPSPEED}zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": f"{DEEPSPEED}zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": f"{DEEPSPEED}deepspeed_config_file",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": f"{DEEPSPEED}gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": f"{DEEPSPEED}gradient_clipping",
    "FSDP_AUTO_WRAP_POLICY": f"{FSDP}fsdp_auto_wrap_policy",
    "FSDP_BACKWARD_PREFETCH": f"{FSDP}fsdp_backward_prefetch",
    "FSDP_STATE_DICT_TYPE": f"{FSDP}fsdp_state_dict_type",
}


def write_file(draft: Draft, source: Source) -> None:
    """Write a configuration file in YAML or JSON, and keep its text."""
    draft.take(source)
    root = single_document(source, draft=draft)
    entries = entries_of(root)
    for name, node in entries.items():
        _write_node(draft, name, name, node, source.name)
        for field, below in entries_of(node).items() if draft.accepts(f"{ACCELERATE}.{name}") else ():
            _write_node(draft, spelled(name, field), f"{name}.{field}", below, source.name)
    if "distributed_type" not in entries:
        place = Place(source.name, root.line, root.column)
        draft.set_key("accelerate.type_missing", True, "distributed_type", place)
    if "fp16" in entries and "mixed_precision" not in entries:  # its name before it had several values
        draft.leave_open("accelerate.mixed_precision")
    _report_fields(draft, entries)


def write_value(draft: Draft, spelling: str, value: object, written: str, place: Place) -> None:
    """Write one value under its path in the file, above its old one; a path that nobody knows is noted."""
    name = f"{ACCELERATE}.{spelling}"
    if not draft.accepts(name):
        draft.note_unknown(written, place, spelling=name)
        return
    field = spelling.rpartition(".")[2]
    key = draft.key(name)
    choices = tuple(str(choice) for choice in key.choices) if key else ()
    draft.set_key(draft.canonical(name), _form(field, choices, value), written, place)


def settle(draft: Draft, folders: Sequence[Path]) -> None:
    """Derive the settings of the training process from the written ones.

    `folders` are where a DeepSpeed file is looked for, beside the working folder.
    """
    _inherit(draft)
    stated = draft.get(TYPE)
    kind = stated.value if stated is not None else None
    for section, prefix in _ACTIVE.items():
        if kind != section:
            draft.judge(prefix, _unread)
    if _is_sagemaker(draft):
        draft.judge(TYPE, _unread)
    if kind == "FSDP":
        wrapped, version = draft.get(f"{FSDP}fsdp_auto_wrap_policy"), draft.get(f"{FSDP}fsdp_version")
        by_size = wrapped is not None and wrapped.value == "SIZE_BASED_WRAP"
        first = version is None or version.value == 1
        draft.judge(FSDP, partial(_read_by_fsdp, first=first, by_size=by_size))
    elif stated is not None and kind == "DEEPSPEED":
        from skill_tools.dialects.accelerate.deepspeed import write_deepspeed

        write_deepspeed(draft, stated, folders)


def spelled(section: str, field: str) -> str:
    """Return the path of a field of a section, with the prefix that the launcher adds.

    It finds a field by its name alone, so that one in another's section counts.
    """
    prefix = _PREFIXES.get(section, "")
    if not field.startswith(prefix.removesuffix("_")):
        field = f"{prefix}{field}"
    path = f"{section}.{field}"
    return path if load_vocabulary(ACCELERATE).accepts(path) else options().get(field, path)


@knowledge.derived
def options() -> dict[str, str]:
    """Return the path of each option by its name: the section of the file that may hold it, or the launcher's own."""
    names = load_vocabulary(ACCELERATE).names
    return {name.rpartition(".")[2]: name for name in names if "." in name}


def _write_node(draft: Draft, spelling: str, written: str, node: Node, file: str) -> None:
    for loser in node.shadowed:
        draft.shadow(f"{ACCELERATE}.{spelling}", plain(loser), Place(file, loser.line, loser.column))
    write_value(draft, spelling, plain(node), written, Place(file, node.line, node.column))


def _form(field: str, choices: Sequence[str], value: object) -> object:
    """Return a value as it is compared: names without regard to case or by number, truths as bools."""
    if value is UNREADABLE or value is None:
        return value
    text = str(value)
    if field == "distributed_type" and value is False:
        return "NO"  # YAML's own word for false; the launcher takes either for one process
    if field in {"fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"} and isinstance(value, str):
        truth = _TRUTHS.get(text.lower())
        return value if truth is None else str(truth).lower()  # stays text, see the key's note
    if field == "fsdp_reshard_after_forward":
        return _TRUTHS.get(text.lower(), value)
    if field in {"offload_optimizer_device", "offload_param_device"}:
        return text.lower()
    number = whole_number(text) if field in _NUMBERED else None
    if number is not None and 0 < number <= len(choices):
        return choices[number - 1]
    if isinstance(value, str) and field != "distributed_type":
        return next((choice for choice in choices if choice.lower() == text.lower()), value)
    return value


def _report_fields(draft: Draft, root: dict[str, Node]) -> None:
    """Note which fields the launcher reports to the training process, because a DeepSpeed file excludes them."""
    excluded = (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_param_nvme_path",
        "offload_optimizer_nvme_path",
        "zero3_save_16bit_model",
    )
    written = [name for name in entries_of(root.get("deepspeed_config")) if name in excluded]
    settings = [draft.get(f"{DEEPSPEED}{name}") for name in written]
    precision = draft.get("accelerate.mixed_precision")
    if precision is not None and precision.value is not None:
        settings.append(precision)
    found = [setting for setting in settings if setting is not None]
    if found:
        names = [setting.written for setting in found]
        key = "accelerate.deepspeed_fields_from_accelerate_config"
        draft.set_key(key, names, found[0].written, found[0].place)


def _is_sagemaker(draft: Draft) -> bool:
    """Return whether the file is for SageMaker's launcher, which has types of its own."""
    place = draft.get("accelerate.compute_environment")
    return place is not None and place.value == "AMAZON_SAGEMAKER"


def _inherit(draft: Draft) -> None:
    """Take fields that neither file nor options set from the environment of the launcher."""
    for variable, key in _INHERITED.items():
        held, given = draft.get(key), draft.get(f"env.{variable}")
        if given is not None and (held is None or held.value is None) and not draft.is_open(key):
            write_value(draft, key.removeprefix(f"{ACCELERATE}."), given.value, given.written, given.place)


def _unread(setting: Setting, expected: str | None) -> str | None:
    """Return None, as nobody reads the value; but options of a type are refused by the parser of options."""
    name = setting.key.rpartition(".")[2]
    return expected if setting.written.startswith("-") and name in _PARSED else None


def _read_by_fsdp(setting: Setting, expected: str | None, *, first: bool, by_size: bool) -> str | None:
    """Return the value that FSDP's plugin expected instead, `first` of version 1, `by_size` of wrapping by size."""
    name, value = setting.key.rpartition(".")[2], setting.value
    if (name in _OF_VERSION_1 and not first) or (name == "fsdp_min_num_params" and not by_size):
        return _unread(setting, expected)
    if name in _READ_AS_TRUTH:
        return None if str(value).lower() in _TRUTHS else "true or false"
    if name == "fsdp_version" and value is None:
        return "1 or 2"
    return "a strategy such as FULL_SHARD" if name == "fsdp_sharding_strategy" and value is None else expected
