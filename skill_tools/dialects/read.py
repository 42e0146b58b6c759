# SPDX-License-Identifier: Apache-2.0
"""The one way from files, text and overrides to a `Config`: finds their dialect, which then composes them.

Each dialect names the proof in an input that it is its own. One proof decides; none, or two that exclude each other,
is an error: a guess would lint against the wrong rules. Proofs of a dialect and of an embedded one do not exclude each
other. A script without proof of its own, or with its launcher's alone, belongs to the dialect of its named files, if
that dialect follows it to them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Kind, Source, load, with_files
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects import not_read, registry
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.errors import OwnLoop, Unrecognised, UnusableInput
from skill_tools.started import COMMAND

if TYPE_CHECKING:
    from skill_tools.configs.shell.command import Argument
    from skill_tools.configs.yaml_lines import Node

_PLENTY = 15


class Contradiction(UnusableInput):
    """An input with proofs of two frameworks at once."""


class Reading(NamedTuple):
    """One configuration as it was recognised: its dialect, the inputs that make it up, and its proof.

    `proof` is empty if the user stated the dialect. `is_part`: the source is a part of a file of another kind (the
    command in a task file), and nothing may be written back. `composed` is the configuration without overrides, where
    the check of a stated dialect has composed it.
    """

    dialect: Dialect
    sources: tuple[Source, ...]
    proof: str = ""
    is_part: bool = False
    composed: Config | None = None

    def compose(self, sources: Sequence[Source] = (), overrides: Sequence[str] = ()) -> Config:
        """Return the configuration, or that of `sources`: the same inputs with other texts."""
        if self.composed is not None and not sources and not overrides:
            return self.composed
        sources = sources or self.sources
        with with_files(_written(sources)):
            config = self.dialect.compose(sources, overrides)
        named = [each for source in sources for each in _named(source)]
        return config._replace(unread_files=_unread(config, named)) if named else config


class Named(NamedTuple):
    """A configuration of `dialect` that a script names at `place`: the word, the file, and its proof."""

    word: str
    place: Place
    source: Source
    dialect: Dialect
    evidence: Evidence

    @property
    def proof(self) -> str:
        """The proof of the script that names it."""
        return f"{self.source.name}, which it names: {self.evidence.proof}"

    def counts_in(self, config: Config) -> bool:
        """Return whether `config` was read from the file too."""
        return os.path.realpath(self.source.name) in map(os.path.realpath, config.sources)


def read(
    inputs: Sequence[str | Path], *, overrides: Sequence[str] = (), framework: str | None = None
) -> Config:
    """Read files, and command line overrides on top of them, into one configuration.

    Raises `UnusableInput` when an input cannot be read, or when it is not clear which framework it is for.
    """
    return read_sources([load(path) for path in inputs], overrides=overrides, framework=framework)


def read_text(
    text: str, filename: str, *, overrides: Sequence[str] = (), framework: str | None = None
) -> Config:
    """Read one configuration from `text`, as if it stood in `filename`."""
    return read_sources([Source(filename, text)], overrides=overrides, framework=framework)


def read_sources(
    sources: Sequence[Source], *, overrides: Sequence[str] = (), framework: str | None = None
) -> Config:
    """Compose `sources` and `overrides` in the precedence of their framework."""
    return _whole(sources, overrides, framework).compose(overrides=overrides)


def readings(
    sources: Sequence[Source], *, overrides: Sequence[str] = (), framework: str | None = None
) -> list[Reading]:
    """Return every configuration that `sources` hold: one, or of a single file one for each recipe or command in it.

    Raises `Unrecognised` when they hold none, `UnusableInput` when they cannot be read or are proven to be two at once.
    """
    if len(sources) != 1 or overrides:
        return [_whole(sources, overrides, framework)]
    (source,) = sources
    if inside := _blocks(source, framework):
        return inside
    try:
        found = _whole(sources, overrides, framework)
    except Unrecognised:
        if inside := _commands(source):
            return inside
        raise
    recipes = found.dialect.recipes(source)
    if not recipes and framework is None:
        raise _unrecognised(sources)
    return [found._replace(sources=(recipe,), composed=None) for recipe in recipes] or [found]


def check_form(sources: Sequence[Source]) -> None:
    """Raise the parser's error about a YAML, JSON or TOML that it does not take: nobody's proof is looked for there."""
    for source in sources:
        if source.kind not in (Kind.PYTHON, Kind.SHELL):
            source.documents  # noqa: B018 - parsed when first asked for


def _whole(sources: Sequence[Source], overrides: Sequence[str], framework: str | None) -> Reading:
    if framework is None:
        dialect, evidence = recognised(sources, overrides)
        return Reading(dialect, tuple(sources), evidence.proof or "its keys")
    return _checked(Reading(registry.named(framework), tuple(sources)))


def _blocks(source: Source, framework: str | None) -> list[Reading]:
    """Return the sections that a file of another framework has for a known one."""
    from skill_tools.dialects.inside import blocks

    return [
        Reading(registry.named(dialect), (part,), kind, is_part=True)
        for kind, dialect, part in blocks(source)
        if framework in (None, dialect)
    ]


def _commands(source: Source) -> list[Reading]:
    """Return the commands in a task file that start a training."""
    from skill_tools.dialects.inside import commands

    found = []
    for kind, part in commands(source):
        with suppress(Unrecognised):  # named, and not read
            if proven := _decided([part]):
                dialect, evidence = proven
                proof = f"the command in {kind}: {evidence.proof or 'its keys'}"
                found.append(Reading(dialect, (part,), proof, is_part=True))
    return found


def recognised(sources: Sequence[Source], overrides: Sequence[str] = ()) -> tuple[Dialect, Evidence]:
    """Return the dialect that `sources` and `overrides` are proven to be in, and the evidence.

    Raises `Unrecognised` when there is no proof, `UnusableInput` when two exclude each other.
    """
    found = _decided(sources, overrides)
    if found is None:
        raise _unrecognised(sources)
    return found


def _decided(sources: Sequence[Source], overrides: Sequence[str] = ()) -> tuple[Dialect, Evidence] | None:
    """Return the dialect and its evidence, None where there is no proof; raises if two exclude each other."""
    not_read.require_none(sources)
    found = _evidence(sources)
    found = _by_named_files(sources, found) or found
    if not found:
        text = "\n".join(overrides)
        found = _proven(
            {each.name: each.evidence_in_text(text) for each in registry.with_files()} if text else {}
        )
    if not found:
        return None
    embedded = {name for each in found for name in _embedded_by(each)}
    not_embedded = {name: evidence for name, evidence in found.items() if name not in embedded} or found
    if len(not_embedded) > 1:
        raise _contradictory(sources, not_embedded)
    ((name, evidence),) = not_embedded.items()
    return registry.named(name), evidence


def _by_named_files(sources: Sequence[Source], found: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Return the proofs of files named by scripts among `sources`, for dialects that follow the script to them.

    A dialect in `found` adds nothing: the launcher's own file, and a section for the launcher. These proofs win over a
    launcher, and over a section of their own that the launcher names.
    """
    known = {*found, *(name for each in found for name in _embedded_by(each))}
    firm = {name for name, evidence in found.items() if not evidence.yields}
    return {
        each.dialect.name: each.evidence._replace(proof=each.proof)
        for source in sources
        for each in _named(source)
        if each.dialect.name not in known
        and firm <= _embedded_by(each.dialect.name)
        and _follows(each, source)
    }


def _written(sources: Sequence[Source]) -> dict[str, Source]:
    """Return the files that scripts among `sources` write by here-documents, and those given beside another by name."""
    given = {f"*/{Path(each.name).name}": each for each in sources[1:] and sources}
    scripts = [each for each in sources if each.kind is Kind.SHELL and "<<" in each.text]
    if not scripts:
        return given
    from skill_tools.configs.shell.documents import written

    return given | {path: file for script in scripts for path, file in written(script)}


def _follows(named: Named, script: Source) -> bool:
    try:
        return named.counts_in(named.dialect.compose([script], ()))
    except UnusableInput:
        return False


def _named(source: Source) -> Iterator[Named]:
    """Yield the files named by a script's commands and proven to be of one dialect.

    An unreadable script or file yields none.
    """
    if source.kind is not Kind.SHELL:
        return
    from skill_tools.configs.shell.launch import named_files

    found: list[tuple[Argument, Source]] = []
    with suppress(UnusableInput):
        found += named_files(source)
    for word, file in found:
        proven: dict[str, Evidence] = {}
        with suppress(UnusableInput):
            proven = _proven(_evidence_in(file))
        if len(proven) == 1:
            ((name, evidence),) = proven.items()
            place = Place(source.name, word.line, word.column)
            yield Named(word.text, place, file, registry.named(name), evidence)


def _unread(config: Config, named: Sequence[Named]) -> tuple[Setting, ...]:
    """Return the words that name an unread configuration, once for each file."""
    unread = {each.source.name: each for each in named if not each.counts_in(config)}
    return tuple(Setting(each.dialect.label, name, each.word, each.place) for name, each in unread.items())


def _checked(stated: Reading) -> Reading:
    """Return the reading; raise `UnusableInput` if its inputs hold nothing of the stated dialect, or proof of another.

    A merely unclear dialect is the user's to state.
    """
    dialect, sources = stated.dialect, stated.sources
    if sources and not dialect.has_files:
        raise UnusableInput(
            f"{dialect.label} has no configuration files, and {sources[0].name} is none of its own",
            expected=f"a configuration of {_listed([each.label for each in registry.with_files()])}",
            attempt=f"{COMMAND} plan --framework {dialect.name} --model NAME, or no --framework for a file",
        )
    toml = [source.name for source in sources if source.kind is Kind.TOML and not dialect.reads_toml]
    if toml:
        raise UnusableInput(
            f"{toml[0]} is TOML, which {dialect.label} does not read",
            expected=f"a configuration of {dialect.label}",
            attempt="no --framework for a TOML",
        )
    found = _evidence(sources)
    if dialect.name in found or not found.keys().isdisjoint(_embedded_by(dialect.name)):
        return stated
    others = {
        name: each
        for name, each in found.items()
        if (each.votes >= _PLENTY or not each.yields) and not _is_kin(dialect, name)
    }
    names = ", ".join(source.name for source in sources)
    if others:
        likely = max(others, key=lambda name: others[name].votes)
        raise UnusableInput(
            f"{names} is no configuration of {dialect.name}",
            expected=f"--framework {likely}, by its own words ({others[likely].proof})",
            attempt=f"--framework {likely}, or none",
        )
    if not found and not any(map(_says_something, sources)):
        return stated
    stated = stated._replace(composed=stated.compose())
    if not _is_read_by(dialect, stated):
        raise UnusableInput(
            f"{names} holds nothing that {dialect.label} reads",
            expected=f"a configuration of {dialect.label}, which has {dialect.looks_for}",
            attempt="no --framework, to hear whose it is",
        )
    return stated


def _says_something(source: Source) -> bool:
    """Return whether `source` has text, if a script, or else a key: a file without any leaves all at their defaults."""
    if source.kind in (Kind.PYTHON, Kind.SHELL):
        return bool(source.text.strip())
    return any(isinstance(document.value, dict) and document.value for document in source.documents)


def _is_kin(dialect: Dialect, name: str) -> bool:
    """Return whether one of two dialects is made from the other, so that inputs of one may be meant for the other."""
    other = registry.named(name)
    return isinstance(dialect, type(other)) or isinstance(other, type(dialect))


def _is_read_by(dialect: Dialect, reading: Reading) -> bool:
    """Return whether the dialect's reader finds a word of its own in the inputs, be it one to complain of."""
    config = reading.compose()
    text = "".join(source.text for source in reading.sources)
    own = (
        config.settings[key]
        for key in config.settings.keys() & load_keys().keys()
        if not key.startswith("env.")
    )
    return bool(
        any(each.written.rpartition(".")[2] in text for each in own)
        or config.unknown or config.wrong_types or config.faults or config.unresolved or config.missing_files
        or any(_has_name_of(dialect, source) for source in reading.sources)
    )  # fmt: skip


def _has_name_of(dialect: Dialect, source: Source) -> bool:
    """Return whether a key of a YAML, JSON or TOML, or the end of its path, is a name that the framework accepts."""
    if source.kind in (Kind.PYTHON, Kind.SHELL):
        return False
    known = {_as_key(name) for name in load_vocabulary(dialect.name).names}
    return any(
        ".".join(path[first:]) in known
        for document in source.documents
        for path in _paths(document)
        for first in range(len(path))
    )


def _as_key(name: str) -> str:
    """Return a name as a file has it, which for an option is without dashes: `--a-b` of a program is `a_b`."""
    *_, option = name.split(" ")
    return option.removeprefix("--").replace("-", "_") if option.startswith("--") else option


def _paths(node: "Node", above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key below `node`; lists have no part in it."""
    for key, child in node.value.items() if isinstance(node.value, dict) else ():
        path = (*above, str(key))
        yield path
        yield from _paths(child, path)
    for child in node.value if isinstance(node.value, list) else ():
        yield from _paths(child, above)


def _evidence(sources: Sequence[Source]) -> dict[str, Evidence]:
    """Return each proven dialect's evidence in any of `sources`, the votes of all added up."""
    found: dict[str, Evidence] = {}
    for source in sources:
        for name, evidence in _proven(_evidence_in(source)).items():
            before = found.get(name, NONE)
            found[name] = Evidence(
                before.votes + evidence.votes,
                before.certain or evidence.certain,
                before.proof or evidence.proof,
                before.yields or evidence.yields,
            )
    return found


def _evidence_in(source: Source) -> dict[str, Evidence]:
    """Ask each dialect that `source` may be of; a text without any of their marks is not even parsed."""
    text = source.script if source.kind is Kind.SHELL else source.text
    return {each.name: each.evidence(source) for each in registry.marked_in(text, source.kind)}


def _proven(found: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Return the evidence that counts: a yielding one only alone, and only the certain one if there is any."""
    found = {name: evidence for name, evidence in found.items() if evidence.votes}
    found = {name: evidence for name, evidence in found.items() if not evidence.yields} or found
    return {name: evidence for name, evidence in found.items() if evidence.certain} or found


def _embedded_by(name: str) -> frozenset[str]:
    """Return the dialects with sections in configurations of `name`, at any depth."""
    found: set[str] = set()
    pending = [name]
    while pending:
        below = set(registry.named(pending.pop()).embeds) - found
        found |= below
        pending += below
    return frozenset(found - {name})


def _unrecognised(sources: Sequence[Source]) -> Unrecognised:
    dialects = registry.with_files()
    names = ", ".join(source.name for source in sources)
    for each in (named for source in sources for named in _named(source)):
        return Unrecognised(
            f"{names} names {each.source.name}, a configuration of {each.dialect.label} ({each.evidence.proof}), in a "
            "command that is not known to read it",
            expected=f"a command of {each.dialect.label}",
            attempt=f"{each.source.name} itself",
        )
    if sources and not any(source.text.strip() for source in sources):
        expected = f"a configuration of {_listed([each.label for each in dialects])}"
        return Unrecognised(f"{names} is empty", expected=expected, attempt="the file that the run reads")
    if answer := _answer_to_loop(sources):
        return OwnLoop(
            f"{names} is a training loop of its own, which no rule is about",
            expected="a configuration, or a script of a framework",
            attempt=answer,
        )
    what = (
        f"{names} is no training configuration that is known" if names else "the overrides tell no framework"
    )
    proofs = tuple(f"{each.label}: {each.looks_for or 'its own names'}" for each in dialects)
    return Unrecognised(
        what,
        expected="proof of one framework (--explain lists it)",
        attempt="--framework NAME",
        looked_for=proofs,
    )


def _answer_to_loop(sources: Sequence[Source]) -> str:
    """Return advice for `sources` that are a loop without a framework."""
    loops = registry.named(registry.WITHOUT_FILES)
    answers = (loops.answer_to_loop(source.text) for source in sources if source.kind is Kind.PYTHON)
    return next(filter(None, answers), "")


def _contradictory(sources: Sequence[Source], found: Mapping[str, Evidence]) -> Contradiction:
    proofs = [
        f"{registry.named(name).label} by {evidence.proof or 'its keys'}" for name, evidence in found.items()
    ]
    return Contradiction(
        f"{', '.join(source.name for source in sources) or 'the overrides'} is {' and '.join(proofs)} at once",
        expected="proof of one framework",
        attempt=f"--framework {_listed(list(found))}",
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
