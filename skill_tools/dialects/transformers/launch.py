# SPDX-License-Identifier: Apache-2.0
"""Finds the commands of a launch script that start a training, and takes their options apart.

The launcher's own options stand before the script: `torchrun --nproc_per_node 8 train.py --bf16 True`. TRL's command
`trl sft` starts a script of its own.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.launch import commands_of
from skill_tools.configs.source import Source, find
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node
from skill_tools.dialects.transformers import BATCH, ENGINES, TRANSFORMERS, TRL_COMMANDS, TRL_SCRIPT
from skill_tools.dialects.transformers.parsers import has_negative, meant
from skill_tools.errors import UnusableInput

_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "trl": "trl",
}
_SPREADING = frozenset(
    {"srun", "mpirun", "mpiexec", "horovodrun", "ray"}
)  # they start a process for each rank
_LEAST_KNOWN = 3
_OWN_PARSER = (
    r"\bArgumentParser\(|\bclick\.(?:command|option)\b|\b(?:tyro|typer)\.|\bfire\.Fire\b|"
    r"\b(?:simple_parsing|jsonargparse)\b"
)
_ARGUMENTS = r"\b(?:\w*TrainingArguments|(?:SFT|DPO|GRPO|KTO|RLOO|Reward)Config)\b"
_TRAINERS_PARSER = rf"\b(?:HfArgumentParser|TrlParser|H4ArgumentParser)\b|{_ARGUMENTS}"
_FILLS_TRAINERS = r"\b(HfArgumentParser|TrlParser|H4ArgumentParser)\("
_FIELD = r"^[ \t]+(\w+)[ \t]*:[^=\n]+="
_A_NODE = ("nproc_per_node", "num_gpus", "num_processes")
_NODES = ("nnodes", "num_nodes")
_PASSED_ON = ("$@", "$*", "${@")
RECIPE = "config"  # TrlParser's option for a recipe
_SUFFIXES = (".yaml", ".yml", ".json")


class Launch(NamedTuple):
    """One start of a script: its launcher, the launcher's words, and the command of the script itself.

    `trainer` is the class that TRL's own command fills, `program` the script's word.
    """

    launcher: str
    before: tuple[Argument, ...]
    program: Argument
    command: Command
    trainer: str | None = None

    @property
    def words(self) -> tuple[Argument, ...]:
        """The arguments of the script."""
        return self.command.words


class Option(NamedTuple):
    """One option of a command line: its name with underscores, its value as text, True, or `UNREADABLE`.

    `is_plain`: it is `x=y` without dashes, which argparse does not parse.
    """

    name: str
    value: object
    place: Place
    is_plain: bool = False

    @property
    def node(self) -> Node:
        """The value with its place."""
        return Node(self.value, self.place.line, self.place.column)


def launches(source: Source) -> list[Launch]:
    """Return the launches in a shell script whose options, with those of their recipe, are mostly a Trainer's."""
    found = started(source)
    folders = [source.folder] if source.folder else []
    theirs = [each for each in found if each.trainer or _is_trainers(each, folders, least=_LEAST_KNOWN)]
    if theirs or trainers_parser(source) is None:
        return theirs
    return [each for each in found if _is_trainers(each, folders, least=1)]


def started(source: Source) -> list[Launch]:
    """Return the launches in a shell script of any Python program."""
    return list(filter(None, map(_launch, commands_of(source))))


def parses_itself(source: Source) -> bool:
    """Return whether the program that a script starts is here and has a parser of its own, not the Trainer's."""
    texts = _programs(source)
    return bool(texts) and all(
        re.search(_OWN_PARSER, text) is not None and re.search(_TRAINERS_PARSER, text) is None
        for text in texts
    )


def trainers_parser(source: Source) -> str | None:
    """Return the parser by which all programs of a script fill the Trainer's arguments; None if they differ."""
    texts = _programs(source)
    found = [re.search(_FILLS_TRAINERS, text) for text in texts if re.search(_ARGUMENTS, text)]
    return found[0][1] if found and found[0] is not None and all(found) and len(found) == len(texts) else None


def declared(source: Source) -> frozenset[str]:
    """Return the names of the fields that the programs of a script declare in classes of their own."""
    return frozenset(name for text in _programs(source) for name in re.findall(_FIELD, text, re.MULTILINE))


def _programs(source: Source) -> list[str]:
    """Return the texts of a script's programs that are here; none if the script is no launch.

    Scripts that lie in a folder of their project start the programs of its root: `python train.py` in scripts/run.sh.
    """
    if ".py" not in source.text:
        return []
    with suppress(UnusableInput):
        programs = [program_of(each, source) for each in started(source)]
        return [program.text for program in programs if program is not None]
    return []


def program_of(launch: Launch, source: Source) -> Source | None:
    """Return the program that a launch in `source` starts, if its name is read and it is here."""
    folders = [source.folder, source.folder / ".."] if source.folder else []
    return find(launch.program.text, folders) if launch.program.resolved else None


def names_recipe(launch: Launch) -> bool:
    """Return whether a launch names its recipe by an option, as `TrlParser` has it, or as its only argument."""
    return any(option.name == RECIPE for option in options(launch.words, ""))


def recipes(launch: Launch, folders: Sequence[Path]) -> list[Source]:
    """Return a launch's recipes that are here: `--config X`, or a file as the only argument."""
    named = [option.value for option in options(launch.words, "") if option.name == RECIPE]
    if not named and launch.words and launch.words[0].text.endswith(_SUFFIXES):
        named = [launch.words[0].text]
    found = [find(str(path), folders) for path in named]
    return [source for source in found if source is not None]


def options(words: Sequence[Argument], file: str) -> Iterator[Option]:
    """Yield the options among `words`: `--x y`, `--x=y`, `--x y z`, `--x`, and plain `x=y`."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, equals, value = word.text.partition("=")
        is_option = name.startswith("--") and len(name) > 2
        if not is_option and not (equals and name.isidentifier()):
            continue
        value_words = [word._replace(text=value)] if equals else []
        while (
            is_option and not equals and position < len(words) and not words[position].text.startswith("--")
        ):
            value_words.append(words[position])
            position += 1
        known = word.certain and all(each.resolved for each in (word, *value_words))
        texts = [each.text for each in value_words]
        stated: object = " ".join(texts) if texts else True
        place = Place(file, word.line, word.column)
        yield Option(
            name.lstrip("-").replace("-", "_"), stated if known else UNREADABLE, place, not is_option
        )


def given_options(
    draft: Draft, words: Sequence[Argument], file: str, names: frozenset[str]
) -> Iterator[Option]:
    """Yield the options among `words` as argparse knows them: under their whole name, `--no_x` as `x` that is false.

    `names` are the parser's. A name without `--no_x` is noted as unknown.
    """
    for option in options(words, file):
        name = option.name if draft.accepts(option.name) else meant(option.name, names)
        negated = name.removeprefix("no_")
        if draft.accepts(name) or negated == name or not draft.accepts(negated) or option.value is not True:
            yield option._replace(name=name)
        elif has_negative(draft, negated):
            yield option._replace(name=negated, value=False)
        else:
            draft.note_unknown(f"--{name}", option.place, nearest=(f"--{negated} false",))


def started_ranks(launch: Launch) -> int | None:
    """Return how many processes `torchrun` or `deepspeed` starts by their own options, on all nodes."""
    said = {option.name: option.value for option in options(launch.before, "")}
    a_node = next((said[name] for name in _A_NODE if name in said), None)
    nodes = next((said[name] for name in _NODES if name in said), "1")
    counts = [
        int(found[0])
        for each in (a_node, nodes)
        if isinstance(each, str) and (found := re.match(r"\d{1,4}(?!\S)", each))
    ]
    return counts[0] * counts[1] or None if len(counts) == 2 else None


def holds_more(words: Sequence[Argument]) -> bool:
    """Return whether unreadable words stand in the place of options: `train.py $EXTRA --bf16 True "$@"`."""
    after_option = False
    for word in words:
        if not word.resolved and not word.text.startswith("--") and not after_option:
            return True
        after_option = word.text.startswith("--") and "=" not in word.text
    return False


def passes_on(script: Source) -> bool:
    """Return whether a script hands on its own arguments, perhaps more options."""
    return any(more in script.text for more in _PASSED_ON)


def _launch(command: Command) -> Launch | None:
    words = command.words
    texts = [word.text for word in words]
    for position, text in enumerate(texts):
        following = texts[position + 1] if position + 1 < len(texts) else ""
        if text.rpartition("/")[2] == "trl" and following in TRL_COMMANDS:
            rest = command._replace(words=words[position + 2 :])
            return Launch("trl", words[:position], words[position + 1], rest, TRL_COMMANDS[following])
        if text.endswith(".py") and position:
            return _launch_at(command, position)
    modules = [position + 1 for position, text in enumerate(texts[:-1]) if text == "-m"]
    return _launch_at(command, modules[-1]) if modules else None


def _launch_at(command: Command, position: int) -> Launch:
    before = command.words[:position]
    rest = command._replace(words=command.words[position + 1 :])
    return Launch(_launcher(before), before, command.words[position], rest)


def _launcher(before: Sequence[Argument]) -> str:
    """Return the script's launcher; unknown if an unfollowed one spreads it."""
    names = [word.text.rpartition("/")[2] for word in before]
    for name in names:
        if name in _LAUNCHERS:
            return _LAUNCHERS[name]
    plain = all(word.resolved for word in before) and not _SPREADING & set(names)
    return "python" if plain and any(name.startswith("python") for name in names) else ""


def _is_trainers(launch: Launch, folders: Sequence[Path], *, least: int) -> bool:
    names = load_vocabulary(TRANSFORMERS).names
    given = {option.name for option in options(launch.words, "")}
    if BATCH in given and given & ENGINES:
        return True
    if re.search(TRL_SCRIPT, launch.program.text):
        return True
    known = len(given & names)
    with suppress(UnusableInput):  # another program's file, in a form of its own
        for recipe in recipes(launch, folders) if known < least else ():
            known += sum(name in names for name in entries_of(single_document(recipe)))
    return known >= least
