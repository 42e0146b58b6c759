# SPDX-License-Identifier: Apache-2.0
"""Reads verl's command lines and YAML, and writes values that verl passes on to Megatron to Megatron's keys.

verl's own configuration files are the base: a key that no override sets has their value, unless the run names another
configuration or program than verl's. Groups that exchange an engine (`model_engine=megatron`, `engine=veomni`, the
configuration `ppo_megatron_trainer`) set its strategies.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from skill_tools import knowledge
from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.folder import above, files_below
from skill_tools.configs.hydra import looks_like_override, parse_override
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.launch import (
    command_line,
    program_end,
    training_command,
    write_environment,
)
from skill_tools.configs.source import Kind, Source, load
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import OMEGACONF, Node, plain
from skill_tools.dialects.verl import VERL
from skill_tools.dialects.verl.megatron import hand_on_to_megatron
from skill_tools.dialects.verl.refused import CONFIGURATION, Base, base_of, note_refused
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest

_OVERRIDES = "<overrides>"
_OWN_PROGRAM = re.compile(
    r"(?:.*\.)?verl\.trainer\.(?:main_ppo|main_ppo_sync|main_ppo_v0|sft_trainer|sft_trainer_ray|fsdp_sft_trainer)"
)
_PROGRAM = re.compile(r"-m\s+(?!torch\b)([\w.]+)")
_OWN_CONFIGURATION = re.compile(r"ppo_trainer|ppo_megatron_trainer|sft_trainer|sft_trainer_engine")
_GROUPS = frozenset(
    {
        "model_engine", "actor", "data", "ref", "rollout", "model", "critic", "reward", "algorithm", "distillation",
        "engine", "optim", "profiler", "legacy_reward_impl", "transfer_queue", "npu_profile", "reward_model",
    }
)  # fmt: skip
_ENGINES = frozenset({"dp", "fsdp", "megatron", "veomni", "torchtitan", "mindspeed", "automodel"})
_STRATEGIES = {"dp": "fsdp"}  # of a model_engine whose name is not its strategy
_ACTOR = "actor_rollout_ref.actor.strategy"
_PPO = "main_ppo"


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a command line of its own."""
    draft = Draft(VERL, converts_text=False)
    draft.complete = True
    is_closed = not sources
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.SHELL:
                is_closed = _write_script(draft, source)
            case Kind.YAML | Kind.JSON:
                _write_file(draft, single_document(source, OMEGACONF, draft=draft), source.name)
            case _:
                raise source.refused(
                    expected="a launch script, overrides or YAML of verl",
                    attempt="the script that starts verl.trainer.main_ppo",
                )
    for text in overrides:
        base = base_of((), "", None, None, is_ppo=False) if is_closed else None
        _write_words(draft, command_line(text, _OVERRIDES), _OVERRIDES, base)
    draft.take_by_truth()
    hand_on_to_megatron(draft)
    model = draft.get("actor_rollout_ref.model.path") or draft.get("model.path")
    draft.model_name = str(model.value) if model is not None else None
    return draft.finish()


def _write_script(draft: Draft, source: Source) -> bool:
    """Write the command of a script; return whether its base is verl's own configuration."""

    def knows(word: str) -> bool:
        return _knows(draft, word)

    command = training_command(source, knows, whole=True)
    write_environment(draft, command, source.name)
    end = program_end(command)
    programs = [command.words[end - 1].text] if end else _PROGRAM.findall(source.text)
    words = command.words[end:]
    package = next((_package(each) for each in programs), "")
    fork = above(source.folder, f"{package}{CONFIGURATION}")
    is_own = all(map(_is_own, programs)) if programs else not _hands_on(command)
    is_closed = is_own and _base_is_own(words) and (fork is not None or not package)
    if not is_closed:
        draft.may_be_set()
    is_ppo = bool(programs) and all(_PPO in program for program in programs)
    base = None
    if is_closed:
        named = _option(words, "--config-name", "-cn")
        configuration = "ppo_trainer" if named is None else named.text.removesuffix(".yaml")
        base = base_of(words, configuration, fork, source.release(VERL), is_ppo=is_ppo)
    _write_words(draft, words, source.name, base)
    return is_closed


def _hands_on(command: Command) -> bool:
    """Return whether the command gives its words to another script, which chooses the configuration below them."""
    script = next((word.text for word in command.words if word.text.endswith((".sh", ".bash"))), None)
    return script is not None and "=" not in script


def _is_own(program: str) -> bool:
    """Return whether a module, or the path of one, is a program of verl itself."""
    return bool(_OWN_PROGRAM.fullmatch(program.removesuffix(".py").replace("/", ".")))


def _package(program: str) -> str:
    """Return the folders of the package that has taken verl in, from a module of it: `a/` from `a.verl.trainer.x`."""
    return program.partition("verl.trainer.")[0].replace(".", "/") if "/" not in program else ""


def _knows(draft: Draft, word: str) -> bool:
    """Return whether a word speaks for a command of verl: one of its programs, or a key."""
    return word.startswith(("verl.trainer.", "verl.experimental.")) or _is_own(word) or draft.accepts(word)


def in_open_mapping(written: str) -> bool:
    """Return whether `written` lies in a mapping that is empty in verl's configuration: a plus adds any key to it."""
    section = written.rpartition(".")[0]
    while section:
        name = section.rpartition(".")[2]
        if section in load_vocabulary(VERL).free_sections:
            return name.startswith("override_") or name.endswith("_kwargs")
        section = section.rpartition(".")[0]
    return False


def _write_file(draft: Draft, root: Node, file: str) -> None:
    """Write a configuration in YAML; it lies over verl's own if its defaults list names that, or has none."""
    parents = entries_of(root).get("defaults")
    named = [plain(each) for each in parents.value] if parents and isinstance(parents.value, list) else []
    if any(name != "_self_" and not _OWN_CONFIGURATION.fullmatch(str(name)) for name in named):
        draft.may_be_set()
    write_tree(draft, root, file, value_of=_value, report_unknown=False)


def _value(node: Node) -> object:
    text = node.value
    return UNREADABLE if isinstance(text, str) and ("${" in text or text == "???") else plain(node)


def _base_is_own(words: Sequence[Argument]) -> bool:
    """Return whether the overrides lie over a configuration of verl's own, as far as options say."""
    name = _option(words, "--config-name", "-cn")
    path = _option(words, "--config-path", "-cp") or _option(words, "--config-dir", "-cd")
    is_named = name is None or bool(_OWN_CONFIGURATION.fullmatch(name.text.removesuffix(".yaml")))
    is_here = path is None or path.text.strip("./") == "config" or "verl/trainer/config" in path.text
    return is_named and is_here and not any(_brings_another(word.text) for word in words)


def _brings_another(override: str) -> bool:
    """Return whether an override joins configurations from elsewhere: a search path, or an engine that verl lacks."""
    key, _, value = override.lstrip("+~").partition("=")
    if key == "hydra.searchpath":
        return True
    is_engine = key.partition("@")[0] in ("model_engine", "actor", "engine")
    return is_engine and "$" not in value and value.removesuffix("_actor") not in _ENGINES


def _write_words(draft: Draft, words: Sequence[Argument], file: str, base: Base | None) -> None:
    """Write the overrides among `words`; `base` is verl's own configuration, None where another one may be."""
    name = _option(words, "--config-name", "-cn")
    if name is not None and "megatron" in name.text:
        _set_strategies(draft, "megatron", name, file)
    for word in words:
        place = Place(file, word.line, word.column)
        is_there = base is None or note_refused(draft, word, place, base)
        if is_there and looks_like_override(word.text):
            _write_override(draft, word, place, base)


def _option(words: Sequence[Argument], *names: str) -> Argument | None:
    """Return the value of an option, as `--name=value` or as the word after it."""
    for position, word in enumerate(words):
        option, equals, value = word.text.partition("=")
        if option in names:
            if equals:
                return word._replace(text=value.strip("'\""))
            return words[position + 1] if position + 1 < len(words) else None
    return None


def _write_override(draft: Draft, word: Argument, place: Place, base: Base | None) -> None:
    sign = word.text[: len(word.text) - len(word.text.lstrip("+~"))]
    written = word.text.lstrip("+~").partition("=")[0].partition("@")[0]
    if written in _GROUPS or written.startswith("hydra"):
        _write_choice(draft, word, written, place.file)
    elif not _is_taken(draft, sign, written):
        is_theirs = base is not None and word.resolved and _is_of_verl(written)
        if base is not None and is_theirs and not _stands_in(written, base.fork):
            draft.note_unknown(word.text.partition("=")[0], place)
    elif sign == "~":
        draft.remove(written)
    else:
        _write_value(draft, word, written, place, is_closed=base is not None and not sign)


def _is_taken(draft: Draft, sign: str, written: str) -> bool:
    """Return whether Hydra takes the key: without a plus an existing one, else any but a misspelt offload."""
    is_closed = "+" not in sign
    if is_closed and in_open_mapping(written):
        return written in _closed_names() or draft.canonical(written) in draft
    return draft.accepts(written) or (not is_closed and "offload" not in written.rpartition(".")[2])


def _is_of_verl(written: str) -> bool:
    """Return whether a key's first name is a section of verl's, or nearly; a fork has others (`env`)."""
    sections = frozenset(name.partition(".")[0] for name in _closed_names())
    section = written.partition(".")[0]
    return section in sections or bool(nearest(section, sections))


def _stands_in(written: str, fork: Path | None) -> bool:
    """Return whether the configuration of a fork has a key.

    Its files hold whole configurations or groups, so a file may have the key's last names alone.
    """
    names = written.split(".")
    return fork is not None and any(
        ".".join(names[start:]) in _paths_in(str(fork)) for start in range(len(names))
    )


@lru_cache(maxsize=4)
def _paths_in(base: str) -> frozenset[str]:
    """Return the dotted paths of all sections and values in the YAML files below `base` that can be read."""
    found: set[str] = set()
    for file in files_below(base):
        with suppress(UnusableInput):
            pending = [("", root) for root in load(file).documents]
            while pending:
                path, node = pending.pop()
                found.add(path)
                pending += [
                    (f"{path}.{name}" if path else name, child) for name, child in entries_of(node).items()
                ]
    return frozenset(found)


@knowledge.derived
def _closed_names() -> frozenset[str]:
    """The keys of verl's own configurations, without keys known only to its readers."""
    return frozenset(knowledge.names(VERL))


def _write_value(draft: Draft, word: Argument, written: str, place: Place, *, is_closed: bool) -> None:
    """Write a value; a mapping is merged into the section, and anything else takes the section's place.

    `is_closed`: the mapping may only have names of the section.
    """
    value: object = UNREADABLE
    if word.resolved and word.certain:
        with suppress(UnusableInput):
            value = parse_override(word.text).value
    if isinstance(value, dict) and (_is_section(written) or not draft.accepts(written)):
        for name, part in value.items():
            path = f"{written}.{name}"
            if is_closed and not in_open_mapping(path) and not draft.accepts(path):
                draft.note_unknown(path, place)
            else:
                draft.set(path, part, place)
        return
    if value is not UNREADABLE and not draft.is_leaf(written):
        draft.remove(written)
    draft.set_key(draft.canonical(written), value, written, place)


def _is_section(written: str) -> bool:
    """Return whether verl's configuration has a mapping there, be it an empty one."""
    return in_open_mapping(f"{written}.") or any(name.startswith(f"{written}.") for name in _closed_names())


def _write_choice(draft: Draft, word: Argument, group: str, file: str) -> None:
    """Write the settings of a group's choice: the strategy of each role."""
    choice = word.text.partition("=")[2]
    known = word.resolved and word.certain
    known = known and choice.removesuffix("_actor") in _ENGINES
    if group in ("model_engine", "actor"):
        _set_strategies(draft, choice.removesuffix("_actor") if known else UNREADABLE, word, file)
    elif group == "engine":
        value = choice if known else UNREADABLE
        draft.set_key("engine.strategy", value, group, Place(file, word.line, word.column))


def _set_strategies(draft: Draft, engine: object, word: Argument, file: str) -> None:
    strategy = _STRATEGIES.get(engine, engine) if isinstance(engine, str) else engine
    for key in (_ACTOR, "critic.strategy"):
        draft.set_key(key, strategy, word.text.partition("=")[0], Place(file, word.line, word.column))
