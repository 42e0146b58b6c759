"""What Megatron Bridge does to a merged configuration before it trains, as far as a rule can see it.

`mixed_precision` overwrites the fields of the same name in model, optimizer and ddp; `comm_overlap` overwrites
the overlap switches that it sets; a distributed optimizer that is on in one section is turned on in both. The
values that lose stay in `Config.overridden`.
"""

from skill_tools.configs.config import Setting
from skill_tools.configs.draft import Draft

_OVERWRITTEN_SECTIONS = ("model", "optimizer", "ddp")
_SYNCHRONIZED = (("use_distributed_optimizer", "ddp.use_distributed_optimizer"),)


def settle(draft: Draft) -> None:
    """Apply what happens after all inputs are merged."""
    _overwrite_precision(draft)
    _overwrite_overlap(draft)
    for one, other in _SYNCHRONIZED:
        _synchronize(draft, one, other)
        _synchronize(draft, other, one)


def _overwrite_precision(draft: Draft) -> None:
    recipe = draft.get("mixed_precision")
    key = draft.table.by_name.get("mixed_precision")
    if recipe is not None and key is not None and isinstance(recipe.value, str):
        for field, value in key.implies.get(recipe.value.replace("-", "_"), {}).items():
            if f"mixed_precision.{field}" not in draft:
                _overwrite(draft, field, recipe, value)
    for setting in draft.below("mixed_precision."):
        if setting.value is not None:
            _overwrite(draft, setting.key.removeprefix("mixed_precision."), setting, setting.value)


def _overwrite(draft: Draft, field: str, source: Setting, value: object) -> None:
    """Give `field` its value in every section that has it."""
    for section in _OVERWRITTEN_SECTIONS:
        spelling = f"{section}.{field}"
        if draft.accepts(spelling):
            draft.set_key(draft.canonical(spelling), value, source.written, source.place)


def _overwrite_overlap(draft: Draft) -> None:
    for setting in draft.below("comm_overlap."):
        spelling = f"model.{setting.key.removeprefix('comm_overlap.')}"
        key = draft.table.find(draft.framework, spelling)
        if key is not None and isinstance(setting.value, bool):
            draft.set_key(key.name, setting.value, setting.written, setting.place)


def _synchronize(draft: Draft, source: str, follower: str) -> None:
    on, other = draft.get(source), draft.get(follower)
    if on is not None and on.value is True and (other is None or other.value is not True):
        draft.set_key(follower, True, on.written, on.place)
