# SPDX-License-Identifier: Apache-2.0
"""Reads LLaMA-Factory's YAML, the words of its command line, and the DeepSpeed file that the result names.

Facts from `llamafactory/hparams/parser.py::read_args` and `llamafactory/launcher.py`: after a YAML, `key=value` wins
over it (from 0.9.3 on), and each value is handed on as it is; without a YAML all arguments are options that argparse
parses. OmegaConf loads the YAML from 0.9.4 on, PyYAML's safe loader before; 0.9.5 reads no JSON. The launcher starts
processes of its own for more than one device, or where FORCE_TORCHRUN says so. Megatron's arguments (USE_MCA) are
another parser's; all others go to Transformers' `Seq2SeqTrainingArguments` and to its Trainer, or in the stage `ppo` to
TRL's (`llamafactory/train/ppo/trainer.py`).
"""

from collections.abc import Sequence
from pathlib import Path, PurePath

from skill_tools.configs.config import Config, Fault, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.releases import is_before
from skill_tools.configs.shell.command import Argument, Command
from skill_tools.configs.shell.launch import command_line, commands_of, write_environment
from skill_tools.configs.source import Kind, Source, find
from skill_tools.configs.tree import SAFE, entries_of, single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import OMEGACONF, Node, as_omegaconf, plain
from skill_tools.configs.yaml_scalars import is_date
from skill_tools.dialects.deepspeed import DEEPSPEED, EMBEDDED, section
from skill_tools.dialects.deepspeed.dialect import is_one as is_deepspeed
from skill_tools.dialects.llama_factory import LLAMA_FACTORY
from skill_tools.dialects.llama_factory.other_trainers import MEGATRON, V1, trainer_of
from skill_tools.dialects.transformers import CLASS, LAUNCHER, TRANSFORMERS, arguments
from skill_tools.dialects.transformers.launch import Launch, given_options, holds_more, started_ranks
from skill_tools.dialects.transformers.parsers import Parser, expected, given
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"
_PACKAGE, _JSON = "llamafactory", "lf-json-file"
_OVERRIDES_SINCE, _OMEGACONF_SINCE = "0.9.3", "0.9.4"  # releases of LLaMA-Factory
_WHICH = f", which LLaMA-Factory loads with from {_OMEGACONF_SINCE} on"
_OWN = "llamafactory."
_LAUNCH = f"{_OWN}launch"
_OF_ARGUMENTS = ("transformers/training_args.py", "transformers/trainer_utils.py")
_OF_TRAINER = ("transformers/", "accelerate/utils/")
_COMMANDS = ("llamafactory-cli", "lmf")
_SCRIPTS = ("train.py", "train_bash.py", "launcher.py", "cli.py")
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
_TRUE = ("true", "y", "1")
_FORMS: dict[type, str] = {list: "list", dict: "mapping"}
_FOLDERS_ABOVE = 4  # files are named as seen from where the run starts, mostly the root of the repository


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, then the DeepSpeed file that the result names."""
    draft = Draft(LLAMA_FACTORY, embeds=EMBEDDED)
    draft.complete = True
    folders = [source.folder for source in sources if source.folder is not None]
    for source in sources:
        draft.take(source)
        match source.kind:
            case Kind.JSON if is_deepspeed(source):
                section.write_file(draft, source)
            case Kind.YAML | Kind.JSON:
                if source.kind is Kind.JSON:
                    draft.faults.append(Fault(_JSON, source.name, Place(source.name, 1, 1)))
                _write_file(draft, source, source.release(_PACKAGE))
            case Kind.SHELL:
                _write_script(draft, source)
            case _:
                raise source.refused(
                    expected="a configuration of LLaMA-Factory, or a script with `llamafactory-cli train`",
                    attempt="the YAML file that `llamafactory-cli train` gets",
                )
    for text in overrides:
        _write_overrides(draft, command_line(text, _OVERRIDES))
    _settle(draft, folders)
    return draft.finish()


def _write_file(draft: Draft, source: Source, release: str | None) -> None:
    loaders = (
        OMEGACONF | SAFE if release is None else SAFE if is_before(release, _OMEGACONF_SINCE) else OMEGACONF
    )
    before_overrides = release is not None and is_before(release, _OVERRIDES_SINCE)
    root = single_document(source, loaders, draft=draft, which=_WHICH)
    for name, node in entries_of(root).items():
        if loaders == SAFE and not before_overrides and node.bare and is_date(node.text or ""):
            raise UnusableInput(
                f"{source.name}:{node.line} is a date ({name}: {node.text})",
                expected="a value that OmegaConf merges: LLaMA-Factory 0.9.3 stops at a date",
                attempt="the value in quotes",
            )
        _write(draft, name, node, Place(source.name, node.line, node.column), Parser.CALL)


def _write(draft: Draft, name: str, node: Node, place: Place, parser: Parser) -> None:
    for loser in node.shadowed:
        draft.shadow(name, plain(loser), Place(place.file, loser.line, loser.column))
    if not draft.accepts(name):
        if not _takes_any(draft):
            draft.note_unknown(name, place)
        return
    if isinstance(node.value, str) and "${" in node.value:
        node = node._replace(value=UNREADABLE)
    node = given(draft, name, node, parser)
    known = draft.key(name)
    if known is not None and not known.name.startswith(_OWN):
        arguments.write(draft, name, node, place.file)
    else:
        # A bare name may be another framework's key.
        draft.set_key(f"{_OWN}{name}", plain(node), name, place)
    key, wanted = known.name if known is not None else "", expected(draft, name, node, parser)
    if wanted is not None and key in draft:
        draft.refuse_type(key, wanted)


def _takes_any(draft: Draft) -> bool:
    """Return whether arguments that nobody knows are dropped, or another parser's."""
    return trainer_of(draft.get) == MEGATRON or _is_on(draft, "ALLOW_EXTRA_ARGS")


def _write_script(draft: Draft, source: Source) -> None:
    """Write the first training command of a script: its YAML, if that is there, then its words."""
    command = next((each for each in commands_of(source) if _trains_at(each)), None)
    if command is None:
        raise UnusableInput(
            f"{source.name} starts no training with LLaMA-Factory",
            expected="a script with `llamafactory-cli train`",
            attempt="the YAML file itself",
        )
    write_environment(draft, command, source.name)
    start = _trains_at(command)
    _note_launch(draft, command, start, source.name)
    words, release = command.words[start:], source.release(_PACKAGE)
    if holds_more(words):
        draft.may_be_set()
    if not words or not words[0].text.endswith((".yaml", ".yml", ".json")):
        _write_options(draft, words, source.name)
        return
    if words[0].text.endswith(".json"):
        place = Place(source.name, words[0].line, words[0].column)
        draft.faults.append(Fault(_JSON, words[0].text, place))
    above = _above([source.folder] if source.folder else [])
    named = find(words[0].text, above) if words[0].resolved else None
    if named is None:
        draft.may_be_set()
        draft.section_may_be_set(DEEPSPEED)
    else:
        draft.take(named)
        _write_file(draft, named, release)
    for word in words[1:]:
        if release is not None and is_before(release, _OVERRIDES_SINCE):
            draft.note_unknown(word.text, Place(source.name, word.line, word.column), nearest=())
        else:
            _write_override(draft, word, source.name, named)


def _trains_at(command: Command) -> int:
    """Return where the arguments of the training begin, 0 if the command trains nothing."""
    texts = [word.text for word in command.words]
    names = [PurePath(text).name for text in texts]
    for position, name in enumerate(names):
        if name in _COMMANDS and texts[position + 1 : position + 2] == ["train"]:
            return position + 2
        if name in _SCRIPTS and ("--finetuning_type" in texts or texts[position + 1 : position + 2]):
            return position + 1
    return 0


def _note_launch(draft: Draft, command: Command, start: int, file: str) -> None:
    """Note whether the command is distributed: by its launcher, or by the signs that LLaMA-Factory's own looks for."""
    program = command.words[max(0, start - 2)]
    place = Place(file, program.line, program.column)
    launched = {PurePath(word.text).name for word in command.words[:start]} & {*_LAUNCHERS}
    devices = command.environment.get("CUDA_VISIBLE_DEVICES")
    if launched or _is_on(draft, "FORCE_TORCHRUN") or trainer_of(draft.get) == MEGATRON:
        draft.set_key(_LAUNCH, "distributed", _LAUNCH, place)
        draft.set_key(LAUNCHER, min(launched, default="torchrun"), LAUNCHER, place)
        ranks = started_ranks(Launch("", command.words[:start], program, command))
        if ranks is not None:
            draft.set_key("env.WORLD_SIZE", str(ranks), "WORLD_SIZE", place)
    elif devices is not None and devices.resolved and devices.text.isdecimal():
        place = Place(file, devices.line, devices.column)
        draft.set_key(_LAUNCH, "single", _LAUNCH, place)
        draft.set_key(LAUNCHER, "python", LAUNCHER, place)
    if "accelerate" in launched:
        draft.section_may_be_set(DEEPSPEED)


def _is_on(draft: Draft, variable: str) -> bool:
    setting = draft.get(f"env.{variable}")
    return setting is not None and str(setting.value).lower() in _TRUE


def _write_overrides(draft: Draft, words: Sequence[Argument]) -> None:
    """Write the words of `--overrides`: options, and `x=y`."""
    if words and words[0].text.startswith("--"):
        _write_options(draft, words, _OVERRIDES)
        return
    for word in words:
        _write_override(draft, word, _OVERRIDES)


def _write_override(draft: Draft, word: Argument, file: str, base: Source | None = None) -> None:
    """Write a word behind a YAML: `x=y`; `--x` is the name of an argument that nobody knows, and `x` is one, null.

    Raises `UnusableInput` for a list over a mapping in the file `base`, or a mapping over a list.
    """
    name, equals, text = word.text.partition("=")
    place = Place(file, word.line, word.column)
    if not word.resolved and not equals:
        return
    if not equals and not draft.accepts(name):
        near = f"{name[2:].replace('-', '_')}="
        draft.note_unknown(name, place, nearest=(near,) if draft.accepts(near[:-1]) else ())
        return
    known = word.resolved and word.certain
    node = _parsed(text, place) if known else Node(UNREADABLE, place.line, place.column)
    held = entries_of(single_document(base)).get(name) if base is not None else None
    if held is not None and {type(held.value), type(node.value)} == {list, dict}:
        raise UnusableInput(
            f"{file}:{place.line} puts a {_FORMS[type(node.value)]} over a {_FORMS[type(held.value)]}: {word.text}",
            expected="one form for both: OmegaConf merges a mapping into a mapping, and a list takes a list's place",
            attempt=f"{name} in the file alone, or on the command line alone",
        )
    _write(draft, name, node, place, Parser.CALL)


def _write_options(draft: Draft, words: Sequence[Argument], file: str) -> None:
    """Write the options of a command without a YAML, as argparse reads them; a word `x=y` is none of them."""
    names = load_vocabulary(LLAMA_FACTORY).names
    for option in given_options(draft, words, file, names):
        if option.is_plain:
            draft.note_unknown(f"{option.name}={option.value}", option.place, nearest=(f"--{option.name}",))
        else:
            _write(draft, option.name, option.node, option.place, Parser.ARGPARSE)


def _parsed(text: str, place: Place) -> Node:
    """Return the value of a word, at its place."""
    from skill_tools.configs.yaml_events import parse

    documents = parse(text, _OVERRIDES)
    node = as_omegaconf(documents[0]) if len(documents) == 1 else Node(text or None, 1, 1)
    return node._replace(line=place.line, column=place.column)


def _settle(draft: Draft, folders: Sequence[Path]) -> None:
    """Note the model, follow the files that are named, and let the rules about the Trainer apply."""
    model = draft.get(f"{_OWN}model_name_or_path")
    if model is not None and isinstance(model.value, str):
        draft.model_name = model.value
        _name_for_the_loader(draft, model)
    arguments.settle(draft, _above(folders))
    trainer = trainer_of(draft.get)
    if trainer is None:
        _share(draft)
    draft.complete = trainer != V1  # which has other defaults


def _name_for_the_loader(draft: Draft, model: Setting) -> None:
    """Name the model, and whether it is quantised, as the rules about Transformers' loading do."""
    bits = draft.get(f"{_OWN}quantization_bit")
    draft.set_key("base_model", model.value, model.written, model.place)
    if bits is not None and bits.value:
        width = 8 if bits.value == 8 else 4  # whatever is not read loads quantised, too
        draft.set_key(f"load_in_{width}bit", True, bits.written, bits.place)


def _share(draft: Draft) -> None:
    """Let the rules about the Trainer apply, and its arguments have the defaults of the class that parses them."""
    stage = draft.get(f"{_OWN}stage")
    is_ppo = stage is not None and stage.value == "ppo"
    draft.shares = {TRANSFORMERS: _OF_ARGUMENTS if is_ppo else _OF_TRAINER}
    origin = stage or next(iter(draft.below(_OWN)), None)
    if origin is not None:
        draft.set_key(CLASS, "Seq2SeqTrainingArguments", origin.written, origin.place)


def _above(folders: Sequence[Path]) -> list[Path]:
    """Return `folders` and their parents, the nearest first."""
    return [above for folder in folders for above in (folder, *folder.resolve().parents[:_FOLDERS_ABOVE])]
