# SPDX-License-Identifier: Apache-2.0
"""Words a change as the run's own framework spells it.

The advice of a message is either words that hold everywhere, or the name of an entry of `knowledge/changes.yaml` with
each framework's settings. A DeepSpeed user is told the JSON's keys, and nobody else is.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.configs.keys import load_keys
from skill_tools.dialects import registry
from skill_tools.rules.fixes import spell


class Change(NamedTuple):
    """One thing to change: in words, and by dialect as settings (canonical key to value) or as words of its own."""

    words: str
    settings: Mapping[str, Mapping[str, object]]
    texts: Mapping[str, str]


@knowledge.derived
def load_changes() -> Mapping[str, Change]:
    """Return every change by its name."""
    return {
        entry["change"]: Change(entry["words"], entry.get("set", {}), entry.get("text", {}))
        for entry in knowledge.index()["changes"]
    }


def told(change: str, dialects: Sequence[str], config: Config | None = None) -> str:
    """Return `change` for a run of `dialects`, its own before embedded ones; its words if none has a form.

    Of several settings only those set by `config` are told; if it sets nothing near them, none is.
    """
    known = load_changes().get(change)
    if known is None:
        return change
    for name in dialects:
        keys = _of_the_run(known.settings.get(name, {}), config)
        if keys:
            lines = _lines(name, {key: known.settings[name][key] for key in keys}, config)
            return f"{lines} ({known.words})" if lines else known.words
    own = next((known.texts[name] for name in dialects if name in known.texts), "")
    return f"{own} ({known.words})" if own and own != known.words else known.words


def _lines(dialect: str, settings: Mapping[str, object], config: Config | None) -> str:
    """Return `settings` as the dialect spells them; "" where an option of another name, such as a strategy, has one."""
    told = []
    for key, value in settings.items():
        ((written, given),) = registry.named(dialect).spelled({key: value}, config).items()
        *sections, last = key.split(".")
        if last not in written.replace("-", "_"):
            return ""
        if (
            written == last != load_keys()[key].spelling.get(dialect)
        ):  # of a file in the trainer's package, with keys in sections
            written = ".".join((*sections[-1:], last))
        told.append(spell(dialect, written, given))
    return ", ".join(told)


def written_settings(dialect: str, wanted: Mapping[str, object], config: Config | None) -> tuple[str, ...]:
    """Return the canonical keys of `wanted` with their values, each as `dialect` writes it."""
    spelled = registry.named(dialect).spelled(wanted, config)
    return tuple(spell(dialect, written, value) for written, value in spelled.items())


def dialects_of(config: Config | None, framework: str, seen: Iterable[str]) -> tuple[str, ...]:
    """Return the dialects of a user's settings: the configuration's, or those with code in the log."""
    if config is not None:
        own = [config.framework, *sorted(config.dialects() - {config.framework})]
        return tuple(own)
    return tuple(dict.fromkeys(name for name in (framework, *seen) if name))


def _of_the_run(settings: Mapping[str, object], config: Config | None) -> tuple[str, ...]:
    """Return the keys of `settings` set by `config`, or else the first with a place in it."""
    if config is None:
        return tuple(settings)[:1]
    here = tuple(key for key in settings if key in config.settings and config.value(key) != settings[key])
    return here or tuple(key for key in settings if _has_a_place(key, config))[:1]


def _has_a_place(key: str, config: Config) -> bool:
    """Return whether a configuration sets something in the key's section; a key in no section always has one."""
    section = key.rpartition(".")[0]
    if not section:
        return key not in config.settings
    return key not in config.settings and any(each.startswith(f"{section}.") for each in config.settings)
