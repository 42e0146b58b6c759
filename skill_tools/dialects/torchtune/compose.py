# SPDX-License-Identifier: Apache-2.0
"""Reads torchtune's YAML and the `key=value` words of `tune run`, which win over it.

Facts from `torchtune/config/_utils.py::_merge_yaml_and_cli_args` and `torchtune/_cli/run.py`: an override of a
component by its section's name alone changes the component, `~key` removes from the file, `None` is null, and the first
word after the launcher's options is the recipe. Unread keys are no error there, so a name counts as misspelt only if it
is close to a key of some recipe.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from skill_tools.configs.config import Config, Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.entries import Entries
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.launch import command_line, commands_of, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import single_document
from skill_tools.configs.values import UNREADABLE, whole_number
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import OMEGACONF, Node, as_omegaconf, plain
from skill_tools.dialects.torchtune import TORCHTUNE
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest

_OVERRIDES = "<overrides>"
_RECIPE, _FAMILY = "torchtune.recipe", "torchtune.family"
_LAUNCHER = {"nproc_per_node": "torchtune.nproc_per_node", "nnodes": "torchtune.nnodes"}
_SWITCHES = {"--standalone", "--no-python", "--no_python", "-m", "--module", "--run-path", "--run_path"}
_FAMILIES = {
    "eleuther_eval": "inference",
    "full_dpo_distributed": "full",
    "full_finetune_distributed": "full",
    "full_finetune_single_device": "full",
    "generate": "inference",
    "knowledge_distillation_distributed": "knowledge_distillation",
    "knowledge_distillation_single_device": "knowledge_distillation",
    "lora_dpo_distributed": "lora",
    "lora_dpo_single_device": "lora",
    "lora_finetune_distributed": "lora",
    "lora_finetune_single_device": "lora",
    "ppo_full_finetune_single_device": "ppo",
    "qat_distributed": "full",
    "qat_lora_finetune_distributed": "lora",
    "qat_single_device": "full",
    "quantize": "inference",
}
_SHOWN_BY = {
    "teacher_model": "knowledge_distillation",
    "reward_and_value_model": "ppo",
    "policy_model": "ppo",
}
_IN_COMMENT = r"^\s*#.*?\btune run\b(?:[ \t]+-{1,2}[\w-]+(?:[= \t]+\d+)?)*[ \t]+([a-z][\w/.]*)"
_DEAD_SECTION = "fsdp"  # of configurations from before 0.2: no recipe reads it
_MEANS_TO = r"offload|(?:activation|gradient)_checkpoint|optim\w*_in_b"  # names that recipes have otherwise

_SIMILAR = 0.9
_REFUSED = "tt-override-refused"
_MISSING = "???"  # which OmegaConf lays over nothing


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`."""
    draft = Draft(TORCHTUNE, converts_text=False)
    draft.complete = True
    entries = Entries()
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.YAML | Kind.JSON:
                _read_file(draft, entries, source)
            case Kind.SHELL:
                _read_script(draft, entries, source)
            case _:
                raise source.refused(
                    expected="a configuration of torchtune, or a script with `tune run`",
                    attempt="the YAML file that `tune run` gets with --config",
                )
    for text in overrides:
        _override(draft, entries, command_line(text, _OVERRIDES), _OVERRIDES)
    _finish(draft, entries)
    return draft.finish()


def _read_file(draft: Draft, entries: Entries, source: Source) -> None:
    entries.write_tree(single_document(source, OMEGACONF, draft=draft), source.name)
    if _RECIPE not in draft and not draft.is_open(_RECIPE):
        _note_recipe_of_comment(draft, source)


def _note_recipe_of_comment(draft: Draft, source: Source) -> None:
    """Take the recipe from the command in the file's comment, if it names one; else its device from the file's name."""
    named = {match[1]: match for match in re.finditer(_IN_COMMENT, source.text, re.MULTILINE)}
    if len(named) == 1:
        (match,) = named.values()
        place = Place(source.name, source.text.count("\n", 0, match.start(1)) + 1, 1)
        _note_recipe(draft, match[1], place)
    elif named:
        draft.leave_open(_RECIPE)


def _note_recipe(draft: Draft, recipe: str, place: Place) -> None:
    """Note the recipe; a foreign one may read and check anything."""
    if recipe in _FAMILIES:
        draft.set_key(_RECIPE, recipe, _RECIPE, place)
        draft.set_key(_FAMILY, _FAMILIES[recipe], _FAMILY, place)
    else:
        draft.leave_open(_RECIPE)
        draft.leave_open(_FAMILY)


def _read_script(draft: Draft, entries: Entries, source: Source) -> None:
    """Read the first `tune run` of a script: the recipe, its file if that is there, and its overrides."""
    command = next((each for each in commands_of(source) if _is_launch(each)), None)
    if command is None:
        raise UnusableInput(
            f"{source.name} runs no `tune run`",
            expected="a script with `tune run RECIPE --config FILE`",
            attempt="the YAML file itself",
        )
    write_environment(draft, command, source.name)
    words = list(command.words[_launch_at(command) + 2 :])
    words = words[_read_launcher(draft, words, source.name) :]
    rest, named = _without_config(words)
    folders = [source.folder] if source.folder else []
    found = find(named.text, folders) if named is not None and named.resolved else None
    if found is None:
        draft.complete = False
    else:
        draft.take(found)
        entries.write_tree(single_document(found, OMEGACONF, draft=draft), found.name)
    _override(draft, entries, rest, source.name)


def _is_launch(command: Command) -> bool:
    return _launch_at(command) >= 0


def _launch_at(command: Command) -> int:
    """Return where `tune run` stands in a command, -1 if it does not."""
    texts = [PurePath(word.text).name for word in command.words]
    return next((position for position, pair in enumerate(pairwise(texts)) if pair == ("tune", "run")), -1)


def _read_launcher(draft: Draft, words: Sequence[Argument], file: str) -> int:
    """Note the options between `run` and the recipe, and the recipe; return where its own arguments begin."""
    position = 0
    while position < len(words) and words[position].text.startswith("-"):
        word = words[position]
        name, equals, value = word.text.partition("=")
        following = words[position + 1] if position + 1 < len(words) else None
        takes_next = not equals and name not in _SWITCHES and following is not None
        key = _LAUNCHER.get(name.lstrip("-").replace("-", "_"))
        if key:
            stated = following if takes_next and following is not None else word
            text = stated.text if takes_next else value
            known = whole_number(text) if stated.resolved else None
            draft.set_key(
                key, UNREADABLE if known is None else known, name, Place(file, word.line, word.column)
            )
        position += 1 + takes_next
    if position < len(words):
        recipe = words[position]
        name = recipe.text if recipe.resolved else ""
        _note_recipe(draft, name, Place(file, recipe.line, recipe.column))
    return position + 1


def _without_config(words: Sequence[Argument]) -> tuple[list[Argument], Argument | None]:
    """Split `--config FILE` off the recipe's arguments."""
    rest: list[Argument] = []
    named = None
    skip = False
    for position, word in enumerate(words):
        if skip:
            skip = False
        elif word.text == "--config" and position + 1 < len(words):
            named, skip = words[position + 1], True
        elif word.text.startswith("--config="):
            named = word._replace(text=word.text.removeprefix("--config="))
        else:
            rest.append(word)
    return rest, named


def _override(draft: Draft, entries: Entries, words: Sequence[Argument], file: str) -> None:
    """Take out the key of `~a.b`, then write each `a.b=c`; note words that torchtune's own parser refuses."""
    for word in words:
        refused = _why_refused(draft, entries, word)
        if refused:
            draft.faults.append(Fault(_REFUSED, refused, Place(file, word.line, word.column)))
        elif word.text.startswith("~"):
            entries.remove(word.text[1:].partition("=")[0])
    components = {name for name in entries.sections if f"{name}._component_" in entries}
    for word in words:
        name, equals, text = word.text.partition("=")
        if not equals or name.startswith(("-", "~")):
            continue
        path = f"{name}._component_" if "." not in name and name in components else name
        place = Place(file, word.line, word.column)
        value = _scalar(text) if word.resolved and word.certain else UNREADABLE
        if isinstance(value, dict | list):
            entries.write_tree(_node(value, path.split("."), place), file)
        elif value != _MISSING or path not in entries:
            entries.write(path, value, name, place)


def _node(value: object, names: Sequence[str], place: Place) -> Node:
    """Return a list or a section as a tree at the path `names`, all of it at `place`."""
    if names:
        return Node({names[0]: _node(value, names[1:], place)}, place.line, place.column)
    if isinstance(value, dict):
        children = {str(name): _node(each, (), place) for name, each in value.items()}
        return Node(children, place.line, place.column)
    items = [_node(each, (), place) for each in value] if isinstance(value, list) else value
    return Node(items, place.line, place.column)


def _why_refused(draft: Draft, entries: Entries, word: Argument) -> str | None:
    """Return the reason of torchtune's own parser to refuse a word, None if it does not or nobody knows."""
    text = word.text
    name = text.lstrip("~-").partition("=")[0]
    if not word.resolved or not word.certain or (text.startswith("-") and not draft.accepts(name)):
        return None
    if text.startswith("--"):
        return f"{text}: an override has no dashes"
    if not text.startswith("~"):
        is_pair = text.count("=") == 1
        return None if is_pair or not draft.accepts(name) else f"{text}: an override is one key and one value"
    if "_component_" in name or f"{name}._component_" in entries:
        return f"{text}: a component cannot be removed"
    is_there = name in entries or name in entries.sections
    return None if is_there or not draft.complete else f"{text}: the file has no such key"


def _scalar(text: str) -> object:
    if text in ("None", ""):
        return None
    from skill_tools.configs.yaml_events import parse

    documents = parse(text, _OVERRIDES)
    if not documents:
        return None
    return plain(as_omegaconf(documents[0])) if len(documents) == 1 else text


def _finish(draft: Draft, entries: Entries) -> None:
    """Write the merged values into the draft, and say which recipe it is for as far as the sections show it."""
    for loser in entries.lost:
        draft.shadow(loser.written, loser.value, loser.place)
    draft.faults += [
        Fault(_REFUSED, f"{each.written}: a list and a section cannot be merged", each.place)
        for each in entries.clashes
    ]
    for path, entry in entries:
        value = entries.resolved(entry.value)
        known = draft.key(path)
        canonical = known.name if known else f"torchtune.{path}"  # a bare name may be another framework's key
        draft.set_key(canonical, value, entry.written, entry.place)
        if path == f"{_DEAD_SECTION}.cpu_offload" and value is True:
            draft.note_unknown(path, entry.place)
    if not draft.is_open(_RECIPE):
        for name, place in entries.top().items():
            if name not in entries.referenced() and _is_misspelt(draft, name):
                draft.note_unknown(name, place)
    component = draft.get("torchtune.model._component_")
    if component is not None and isinstance(component.value, str):
        draft.model_name = model_name(component.value)
    if _FAMILY not in draft and not draft.is_open(_FAMILY):
        _note_family(draft, entries)


def _is_misspelt(draft: Draft, name: str) -> bool:
    """Return whether no recipe reads `name`, and it means or looks like a key of some recipe."""
    if draft.accepts(name):
        return False
    if re.search(_MEANS_TO, name):
        return True
    return bool(nearest(name, load_vocabulary(TORCHTUNE).names, count=1, likeness=_SIMILAR))


def _note_family(draft: Draft, entries: Entries) -> None:
    """Name the recipe's task: by a section that only one kind has, by the lack of an optimizer, by the model."""
    shown = next((section for section in _SHOWN_BY if section in entries.sections), None)
    if shown is not None:
        family, place = _SHOWN_BY[shown], entries.sections[shown]
    elif not draft.complete:
        return
    elif "optimizer" not in entries.sections:
        family, place = "inference", Place(next(iter(draft.sources), _OVERRIDES), 1, 1)
    else:
        component = draft.get("torchtune.model._component_")
        if component is None:
            draft.leave_open(_FAMILY)
            return
        family, place = "lora" if "lora_" in str(component.value) else "full", component.place
    draft.set_key(_FAMILY, family, _FAMILY, place)


def model_name(component: str) -> str:
    """Return the model that a builder means: llama-3.1-8b for `torchtune.models.llama3_1.lora_llama3_1_8b`."""
    module, _, builder = component.rpartition(".")
    series = module.rpartition(".")[2]
    size = re.sub(r"^(?:q?lora_|dora_)", "", builder).removeprefix(series).strip("_")
    spelled = re.sub(r"^(llama|gemma)(?=\d)", r"\1-", series)
    return re.sub(r"(?<=\d)_(?=\d)", ".", f"{spelled}-{size}").replace("_", "-")
