# SPDX-License-Identifier: Apache-2.0
"""Megatron Core inside another framework: its keys keep their canonical names, so that its own rules read them.

A framework that builds Megatron's configuration classes itself passes some of its keys on to them. Its reader says
here which ones; this module finds their canonical names in the sections of Megatron Bridge (`model`, `optimizer`,
`ddp`). `SHARED_CODE` decides the rules that apply: rules about code with any caller.
"""

from collections.abc import Mapping

from skill_tools.configs.config import Setting
from skill_tools.configs.draft import Draft
from skill_tools.dialects.megatron import BRIDGE

SHARED_CODE = ("megatron/core/", "transformer_engine/")


def share(draft: Draft, code: tuple[str, ...] = SHARED_CODE) -> None:
    """Let the rules about `code` apply to `draft`, and their keys have the defaults of Megatron's classes."""
    draft.shares = {BRIDGE: code}


def hand_on(draft: Draft, path: str, spelling: str) -> None:
    """Give Bridge's key `spelling` the value under `path`, if there is one."""
    key = draft.table.find(BRIDGE, spelling)
    if key is None:
        return
    setting = draft.get(path)
    if setting is not None:
        is_off = (
            setting.value is False and key.type_in(BRIDGE) == "str"
        )  # such as fp8: asked only for its truth
        draft.set_key(key.name, None if is_off else setting.value, setting.written, setting.place)
    elif draft.is_open(path):
        draft.leave_open(key.name)


def hand_on_all(draft: Draft, path: str, section: str) -> None:
    """Give the keys of Bridge's `section` the values that stand below `path`."""
    for name in draft.names_below(f"{path}."):
        hand_on(draft, name, f"{section}.{name.removeprefix(f'{path}.')}")


def give(draft: Draft, values: Mapping[str, object], origin: Setting) -> None:
    """Give canonical keys the values that follow from `origin`."""
    for name, value in values.items():
        draft.set_key(name, value, origin.written, origin.place)


def model_may_set(draft: Draft) -> None:
    """Note that the model's provider decides in place of a Bridge recipe, except for the framework's own decisions.

    Such a key has a default of the framework's own.
    """
    draft.keys_may_be_set(
        key.name
        for key in draft.table.by_name.values()
        if BRIDGE in key.spelling
        and (key.recipe_sets or key.mechanism == "model")
        and draft.framework not in key.default
    )
