# SPDX-License-Identifier: Apache-2.0
"""Accelerate's input of DeepSpeed: the file that it names, or a JSON made of a few fields; both as `deepspeed.*` keys.

Fields of the command line and the environment count where the file says "auto", and nowhere else in it.
Facts: accelerate/utils/dataclasses.py::DeepSpeedPlugin of 1.13.0 to 1.15.0.
"""

from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source
from skill_tools.configs.tree import single_document, write_tree
from skill_tools.dialects.accelerate import DEEPSPEED, SCRIPT
from skill_tools.dialects.deepspeed import section

_ZERO = "deepspeed.zero_optimization."
_DEVICES = ("offload_optimizer", "offload_param")
_PRECISIONS = (("fp16", ("fp16",)), ("bf16", ("bf16", "fp8")))
_LEFT_TO_THE_RUN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def write_deepspeed(draft: Draft, stated: Setting, folders: Sequence[Path]) -> None:
    """Write the `deepspeed.*` keys; `stated` has chosen DeepSpeed; values that nobody set come from there."""
    _refuse_clipping(draft)
    key = f"{DEEPSPEED}deepspeed_config_file"
    named = draft.get(key)
    if draft.is_open(key):
        draft.section_may_be_set("deepspeed")
    elif named is None or named.value in (None, "none"):
        _write_fields(draft, stated)
    elif _follows(draft, named, folders):
        if not draft.below("deepspeed.zero_optimization"):
            _derive(draft, "accelerate.zero_missing", True, named)
        _fill_auto(draft, stated)
    else:
        section.leave_open(draft, named)


def _follows(draft: Draft, named: Setting, folders: Sequence[Path]) -> bool:
    """Write the named file, or the JSON that stands in its place; return whether there is any."""
    text = str(named.value)
    if not text.lstrip().startswith("{"):
        return section.follow(draft, named, folders)
    source = Source(named.place.file, "\n" * (named.place.line - 1) + text)
    root = single_document(source)
    write_tree(draft, root, source.name, spell=lambda path: f"deepspeed.{path}")
    section.settle(draft)
    return True


def _refuse_clipping(draft: Draft) -> None:
    """Note a clipping value that is no number; the plugin reads it as one."""
    clipping = draft.get(f"{DEEPSPEED}gradient_clipping")
    if clipping is None or clipping.value in (None, "auto"):
        return
    try:
        float(str(clipping.value))
    except ValueError:
        draft.refuse_type(clipping.key, "a number, or auto")


def _write_fields(draft: Draft, stated: Setting) -> None:
    """Write the plugin's own JSON for an input without a DeepSpeed file."""
    _write_stage(draft, stated)
    for name in _DEVICES:
        _write_device(draft, stated, name)
    saved = _origin(draft, f"{DEEPSPEED}zero3_save_16bit_model", stated)
    gathers = saved is not stated and str(saved.value).lower() == "true"
    _derive(draft, f"{_ZERO}stage3_gather_16bit_weights_on_model_save", gathers, saved)
    precision = _origin(draft, "accelerate.mixed_precision", stated)
    for name, words in _PRECISIONS:
        _derive(draft, f"deepspeed.{name}.enabled", precision.value in words, precision)
    for name in (*_LEFT_TO_THE_RUN, "gradient_clipping"):
        draft.leave_open(f"deepspeed.{name}")


def _write_stage(draft: Draft, stated: Setting) -> None:
    if draft.is_open(f"{DEEPSPEED}zero_stage"):
        draft.leave_open(f"{_ZERO}stage")
        return
    stage = _origin(draft, f"{DEEPSPEED}zero_stage", stated)
    _derive(draft, f"{_ZERO}stage", 2 if stage is stated else stage.value, stage)


def _write_device(draft: Draft, stated: Setting, name: str) -> None:
    """Write one device; a path of the file or of an option does not reach the plugin, one of the environment does."""
    field = f"{DEEPSPEED}{name}_device"
    if draft.is_open(field):
        draft.leave_open(f"{_ZERO}{name}.device")
        return
    device = _origin(draft, field, stated)
    if device is not stated and device.value not in ("none", "cpu", "nvme"):  # acc-ds-device-value says it
        draft.leave_open(f"{_ZERO}{name}.device")
        return
    _derive(draft, f"{_ZERO}{name}.device", "none" if device is stated else device.value, device)
    if device.value == "nvme":
        in_script = f"{DEEPSPEED}{name}_nvme_path"
        variable = f"env.ACCELERATE_DEEPSPEED_{name.upper()}_NVME_PATH"
        path = _origin(draft, in_script if SCRIPT in draft else variable, device)
        _derive(draft, f"{_ZERO}{name}.nvme_path", "none" if path is device else path.value, path)


def _fill_auto(draft: Draft, stated: Setting) -> None:
    """Add fields that the named file lacks, replace "auto" by the plugin's values, and leave the rest to the run."""
    precision = _origin(draft, "accelerate.mixed_precision", stated).value
    for name, words in _PRECISIONS:
        if not draft.below(f"deepspeed.{name}."):
            _derive(draft, f"deepspeed.{name}.enabled", precision in words, stated)
    stage = _origin(draft, f"{DEEPSPEED}zero_stage", stated)
    filled: dict[str, object] = {
        f"{_ZERO}stage": 2 if stage is stated else stage.value,
        f"{_ZERO}stage3_gather_16bit_weights_on_model_save": False,
        **{f"deepspeed.{name}.enabled": precision in words for name, words in _PRECISIONS},
    }
    for setting in draft.below("deepspeed."):
        if setting.value != "auto":
            continue
        name = setting.key.removeprefix(_ZERO).removesuffix(".device")
        if name in _DEVICES:
            given = _origin(draft, f"{DEEPSPEED}{name}_device", stated)
            draft.set_key(
                setting.key, "none" if given is stated else given.value, setting.written, setting.place
            )
        elif setting.key in filled:
            draft.set_key(setting.key, filled[setting.key], setting.written, setting.place)
        else:
            draft.leave_open(setting.key)


def _derive(draft: Draft, key: str, value: object, source: Setting) -> None:
    draft.set_key(key, value, source.written, source.place)


def _origin(draft: Draft, key: str, otherwise: Setting) -> Setting:
    """Return the setting of `key`, or `otherwise` where nobody set it to anything."""
    setting = draft.get(key)
    return otherwise if setting is None or setting.value is None else setting
