"""The one way from files, text and overrides to a `Config`: whose they are, then that dialect composes them.

Each dialect counts the names that only it would use; the most wins. A tie, or nothing recognised, is an error that
offers `--framework`: a guess would lint against the wrong rules.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source, load
from skill_tools.dialects import registry
from skill_tools.dialects.base import Dialect, Evidence
from skill_tools.errors import UnusableInput

_PLENTY = 15


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
    if framework is None:
        return recognised(sources, overrides).compose(sources, overrides)
    dialect = registry.named(framework)
    _check_stated(dialect, sources)
    return dialect.compose(sources, overrides)


def recognised(sources: Sequence[Source], overrides: Sequence[str]) -> Dialect:
    """Return the dialect that `sources` and `overrides` are in.

    Raises `UnusableInput` when none, or more than one, fits.
    """
    votes = _votes(sources)
    if not votes:
        text = "\n".join(overrides)
        votes = _counted({each.name: each.evidence_in_text(text) for each in registry.with_files()})
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        raise _unclear(sources)
    return registry.named(ranked[0][0])


def _check_stated(dialect: Dialect, sources: Sequence[Source]) -> None:
    """Raise `UnusableInput` where `sources` hold next to nothing of the stated framework and plenty of another's.

    What is merely unclear is the user's to state.
    """
    if sources and not dialect.has_files:
        raise UnusableInput(
            f"{dialect.label} has no configuration files, and {sources[0].name} is none of its own",
            expected=f"a configuration of {_listed([each.label for each in registry.with_files()])}",
            attempt=f"offload plan --framework {dialect.name} --model NAME, or no --framework for a file",
        )
    votes = _votes(sources)
    if not votes:
        return
    likely, count = votes.most_common(1)[0]
    if count >= _PLENTY and count >= _PLENTY * votes[dialect.name]:
        raise UnusableInput(
            f"{', '.join(source.name for source in sources)} is no configuration of {dialect.name}",
            expected=f"--framework {likely}, by what it holds",
            attempt=f"--framework {likely}, or none",
        )


def _votes(sources: Sequence[Source]) -> Counter[str]:
    votes: Counter[str] = Counter()
    for source in sources:
        votes.update(_counted({each.name: each.evidence(source) for each in registry.with_files()}))
    # A file that another framework's input may name is a part of that one's configuration.
    embedded = {section for name in votes for section in registry.named(name).embeds if section != name}
    return Counter({name: count for name, count in votes.items() if name not in embedded})


def _counted(found: dict[str, Evidence]) -> Counter[str]:
    """Return the votes of each framework that has any; beside certain evidence no other counts."""
    certain = [name for name, evidence in found.items() if evidence.certain][:1]
    return +Counter({name: found[name].votes for name in certain or found})


def _unclear(sources: Sequence[Source]) -> UnusableInput:
    dialects = registry.with_files()
    expected = f"a configuration of {_listed([each.label for each in dialects])}"
    if sources and not any(source.text.strip() for source in sources):
        return UnusableInput(
            f"{sources[0].name} is empty", expected=expected, attempt="the file that the run reads"
        )
    names = ", ".join(source.name for source in sources) or "the overrides"
    return UnusableInput(
        f"cannot tell which framework {names} is for",
        expected=expected,
        attempt=f"--framework {_listed([each.name for each in dialects])}",
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
