"""Reads Megatron Bridge's files and overrides into a draft.

An override file holds a part of a ConfigContainer and the recipe fills the rest; a saved `run_config.yaml` (with
`_target_`) holds all of it. `bridge_compose` does what Bridge itself does to the values afterwards; recipes in
Python are read by `python_recipe`, launch programs by `run_recipe`.
"""

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.tree import entries_of, write_tree
from skill_tools.configs.values import UNREADABLE, dtype_name
from skill_tools.configs.yaml_lines import Node, plain

# Sections beside those of a ConfigContainer, for the program that builds one: the recipe to call, the run, its data.
_OF_THE_LAUNCHER = frozenset({"recipe", "run", "data"})
_WRAPPED_MODEL = "model.transformer."


def write_file(draft: Draft, root: Node, file: str) -> None:
    """Write an override file or a saved run config into `draft`.

    A saved run config was written by the framework, so its keys are not checked, and what it lacks is default.
    """
    saved = is_saved_run(root)
    draft.complete = draft.complete or saved
    entries = {name: node for name, node in entries_of(root).items() if name not in _OF_THE_LAUNCHER}
    root = root._replace(value=entries)
    write_tree(
        draft, root, file, spell=_spelling, value_of=_value, is_value=_is_value, report_unknown=not saved
    )
    environment = _child(root, "env_vars")
    for variable, node in entries_of(environment).items():
        draft.set_environment(variable, _value(node), Place(file, node.line, node.column))
    draft.model_name = _model_name(root) or draft.model_name


def write_override(draft: Draft, text: str, place: Place) -> None:
    """Write one dotted override into `draft`."""
    from skill_tools.configs.hydra import parse_override

    override = parse_override(text)
    spelling = _spelling(override.key)
    if override.key.startswith("env_vars."):
        draft.set_environment(override.key.removeprefix("env_vars."), override.value, place)
    elif not draft.accepts(spelling):
        draft.note_unknown(f"{override.sign}{override.key}", place)
    elif override.sign == "~":
        draft.remove(spelling)
    else:
        write_section(draft, spelling, override.value, override.key, place)


def write_section(draft: Draft, spelling: str, value: object, written: str, place: Place) -> None:
    """Write a value; a dict given to a section (`model={num_layers: 4}`) sets the fields of that section."""
    if isinstance(value, dict):
        for name, part in value.items():
            write_section(draft, f"{spelling}.{name}", part, f"{written}.{name}", place)
    if not isinstance(value, dict) or draft.table.find(draft.framework, spelling):
        draft.set_key(draft.canonical(spelling), value, written, place)


def is_saved_run(root: Node) -> bool:
    """Return whether `root` is a whole ConfigContainer that Bridge saved, not a part that overrides one."""
    container = _target(root).rpartition(".")[2] == "ConfigContainer"
    return container or bool(_target(_child(root, "model")))


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
    if isinstance(node.value, str) and ("${" in node.value or node.value == "???"):
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
