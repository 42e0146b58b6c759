# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron Bridge's files and overrides into a draft.

An override file holds a part of a ConfigContainer and the recipe fills the rest; a saved `run_config.yaml` (with
`_target_`) holds all of it. `bridge_compose` makes Bridge's own changes of the values afterwards; recipes in
Python are read by `python_recipe`, launch programs by `run_recipe`.
"""

from skill_tools.configs.config import Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.hydra import Override, parse_override
from skill_tools.configs.tree import entries_of, write_tree
from skill_tools.configs.values import UNREADABLE, dtype_name
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects.megatron import BRIDGE

# Sections beside those of a ConfigContainer, for the program that builds one: the recipe to call, the run, its data.
_OF_THE_LAUNCHER = frozenset({"recipe", "run", "data"})
_WRAPPED_MODEL = "model.transformer."
_SECTIONS = frozenset(
    {"model", "optimizer", "ddp", "train", "scheduler", "checkpoint"}
)  # no run is without one
_REFUSED = "br-override-refused"
_MISSING = "???"  # OmegaConf's own: the earlier value stays


def write_file(draft: Draft, root: Node, file: str) -> None:
    """Write an override file or a saved run config into `draft`.

    A saved run config was written by the framework, so its keys are not checked, and missing ones have their defaults.
    """
    saved = is_saved_run(root)
    draft.complete = draft.complete or saved
    entries = {name: node for name, node in entries_of(root).items() if name not in _OF_THE_LAUNCHER}
    for name in _SECTIONS & entries.keys():
        if not isinstance((node := entries[name]).value, dict):
            text = f"{name}: null or a value in the place of the section, which no run is without"
            draft.faults.append(Fault(_REFUSED, text, Place(file, node.line, node.column)))
            del entries[name]
    root = _without_missing(root._replace(value=entries))
    write_tree(
        draft, root, file, spell=_spelling, value_of=_value, is_value=_is_value, report_unknown=not saved
    )
    environment = _child(root, "env_vars")
    for variable, node in entries_of(environment).items():
        draft.set_environment(variable, _value(node), Place(file, node.line, node.column))
    draft.model_name = _model_name(root) or draft.model_name


class Overrides:
    """Dotted overrides in their order, laid over a configuration as Hydra lays them.

    The recipe behind it is not known: a field unset here is taken to have its default, which may be wrong.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._removed: set[str] = set()

    def write(self, text: str, place: Place) -> None:
        """Write one override into the draft; it becomes a fault if it does not fit the present value.

        Raises `UnusableInput` for a text that is no override.
        """
        override = parse_override(text)
        spelling = _spelling(override.key)
        if override.key.startswith("env_vars."):
            self._draft.set_environment(override.key.removeprefix("env_vars."), override.value, place)
        elif not self._names_field(spelling):
            self._draft.note_unknown(f"{override.sign}{override.key}", place)
        elif reason := self._why_not(override, spelling):
            self.refuse(f"{text}: {reason}", place)
        elif override.sign == "~":
            self._draft.remove(spelling)
            self._removed.add(spelling)
        else:
            self._removed.discard(spelling)
            self._write_section(spelling, override, override.value, override.key, place)

    def refuse_form(self, text: str, expected: str, place: Place) -> None:
        """Note that the run ends at a word without an override, if the word names a section of a configuration."""
        if text.lstrip("+~").partition("=")[0].partition(".")[0] in _SECTIONS:
            self.refuse(f"{text}: expected {expected}", place)

    def refuse(self, text: str, place: Place) -> None:
        """Note that the run ends at an override."""
        self._draft.faults.append(Fault(_REFUSED, text, place))

    def _names_field(self, name: str) -> bool:
        return name in _SECTIONS or self._draft.accepts(name)

    def _why_not(self, override: Override, spelling: str) -> str | None:
        """Return Hydra's reason to refuse an override of an existing field; None if it does not, or may not."""
        value, sign = override.value, override.sign
        is_gone = any(f"{spelling}.".startswith(f"{each}.") for each in self._removed)
        if is_gone and sign not in ("+", "++"):
            return "an override before it has taken the key out"
        if spelling in _SECTIONS and sign != "~" and not isinstance(value, dict):
            return "there is a value already" if sign == "+" else "a section has only fields"
        if spelling in _SECTIONS and value is not None and sign == "~":
            return "its value is another one"
        held = [] if is_gone or spelling in _SECTIONS else self._held(spelling)
        if sign == "+" and held and None not in held and not isinstance(value, dict | list):
            return "there is a value already"
        if isinstance(value, dict) and (reason := _why_no_mapping(value, held, is_closed=not sign)):
            return reason
        if isinstance(value, list) and any(isinstance(each, dict) for each in held):
            return "a list and a section cannot be merged"
        if sign == "~" and held == [None]:
            return "null is nothing to take out"
        if (
            sign == "~"
            and value is not None
            and UNREADABLE not in (value, *held)
            and held
            and value not in held
        ):
            return f"its value is {held[0]}"
        return None

    def _held(self, spelling: str) -> list[object]:
        """Return a field's present values: one value, or its default in each release; none where a recipe sets it."""
        setting, key = self._draft.get(self._draft.canonical(spelling)), self._draft.key(spelling)
        if setting is not None:
            return [setting.value]
        default = key.default.get(BRIDGE) if key is not None else None
        if isinstance(default, list) and default and isinstance(default[0], dict):
            return [each["value"] for each in default]
        return [] if default is None else [default]

    def _write_section(
        self, spelling: str, override: Override, value: object, written: str, place: Place
    ) -> None:
        """Write a value; a dict given to a section (`model={num_layers: 4}`) sets the fields of that section."""
        if isinstance(value, dict) and not self._draft.is_leaf(spelling):
            for name, part in value.items():
                below = f"{spelling}.{name}"
                if spelling in _SECTIONS and not self._draft.accepts(below):
                    self._draft.note_unknown(f"{override.sign}{written}.{name}", place)
                else:
                    self._write_section(below, override, part, f"{written}.{name}", place)
        if not isinstance(value, dict) or self._draft.table.find(self._draft.framework, spelling):
            self._draft.set_key(self._draft.canonical(spelling), value, written, place)


def _why_no_mapping(value: dict[str, object], held: list[object], *, is_closed: bool) -> str | None:
    """Return why OmegaConf does not merge a mapping into a field's value; None where it does."""
    if "null" in value:
        return "null is no key"
    if any(isinstance(each, list) for each in held):
        return "a list and a section cannot be merged"
    lacks = any(isinstance(each, dict) and value.keys() - each.keys() for each in held)
    return "there is no such key in it" if is_closed and lacks else None


def write_section(draft: Draft, spelling: str, value: object, written: str, place: Place) -> None:
    """Write the value of a field, or the dict that an option gives it."""
    if isinstance(value, dict):
        for name, part in value.items():
            write_section(draft, f"{spelling}.{name}", part, f"{written}.{name}", place)
    if not isinstance(value, dict) or draft.table.find(draft.framework, spelling):
        draft.set_key(draft.canonical(spelling), value, written, place)


def is_saved_run(root: Node) -> bool:
    """Return whether `root` is a whole ConfigContainer saved by Bridge, not an overriding part."""
    container = _target(root).rpartition(".")[2] == "ConfigContainer"
    return container or bool(_target(_child(root, "model")))


def _without_missing(node: Node) -> Node:
    """Return the tree without the values that are missing: each leaves the earlier value."""
    if not isinstance(node.value, dict):
        return node
    kept = {name: _without_missing(each) for name, each in node.value.items() if each.value != _MISSING}
    return node._replace(value=kept)


def _spelling(path: str) -> str:
    """Return the field that `path` names: a wrapped model keeps its TransformerConfig one level deeper."""
    return f"model.{path[len(_WRAPPED_MODEL) :]}" if path.startswith(_WRAPPED_MODEL) else path


def _is_value(node: Node) -> bool:
    """Return whether `node` is a value: anything but a section; a mapping that builds an object is one."""
    entries = entries_of(node)
    return not isinstance(node.value, dict) or any(
        key in entries for key in ("_call_", "_args_", "_partial_")
    )


def _value(node: Node) -> object:
    if isinstance(node.value, str) and ("${" in node.value or node.value == _MISSING):
        return UNREADABLE
    if isinstance(node.value, list):
        items = [_value(item) for item in node.value]
        return UNREADABLE if UNREADABLE in items else items
    entries = entries_of(node)
    if "_name_" in entries:
        return entries["_name_"].value
    if "_args_" in entries and "_partial_" not in entries:
        arguments = plain(entries["_args_"])
        return arguments[0] if isinstance(arguments, list) and arguments else None
    target = _target(node)
    return (dtype_name(target) or target) if target and _is_value(node) else plain(node)


def _model_name(root: Node) -> str | None:
    for name in ("hf_model_id", "hf_path"):
        node = _child(_child(root, "model"), name)
        if isinstance(node.value, str):
            return node.value
    return _target(_child(root, "model")).rpartition(".")[2] or None


def _target(node: Node) -> str:
    target = _child(node, "_target_").value
    return target if isinstance(target, str) else ""


def _child(node: Node, name: str) -> Node:
    return entries_of(node).get(name) or Node(None, 0, 0)
