# SPDX-License-Identifier: Apache-2.0
"""The values that a run needs and that only its start knows: `$1` of a launch script, a computed value, `${oc.env:X}`.

Their defaults count instead, so they become an assumption. A dialect need not name its keys here: those that it asks
for while it builds the run and its mode are the ones that matter.
"""

from collections.abc import Collection, Iterator, Mapping

from skill_tools.configs.config import Config, Setting
from skill_tools.configs.keys import load_keys
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.base import Dialect
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import NotPlannedError, UnusableInput

_SHOWN = 8


class _Watched(Mapping[str, Setting]):
    """Settings that note each key that they are asked for and lack."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = settings
        self.lacking: set[str] = set()

    def __getitem__(self, key: str) -> Setting:
        if key not in self._settings:
            self.lacking.add(key)
        return self._settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)


def run_of(dialect: Dialect, config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run that `config` describes, with an assumption about its unreadable values.

    An assumption that such a key is not set gives way to it. Raises `UnusableInput` for sizes that cannot be, and names
    those keys in it.
    """
    settings = _Watched(config.settings)
    watched = config._replace(settings=settings)
    try:
        run = dialect.run(watched, shape, gpus=gpus)
        dialect.current(watched, run)
    except NotPlannedError:
        raise
    except UnusableInput as error:
        if said := _assumption(dialect, _written(settings.lacking & config.unresolved)):
            raise UnusableInput(
                f"{error.problem}, where {said.text}", expected=error.expected, attempt=said.remedy
            ) from None
        raise
    unread = _written(settings.lacking & config.unresolved)
    said = _assumption(dialect, unread)
    if said is None:
        return run
    names = [dialect.spelling(key) for key in unread]
    kept = (each for each in run.assumptions if not any(name in each.text for name in names))
    return run._replace(assumptions=(said, *kept))


def _written(keys: Collection[str]) -> Collection[str]:
    """Return those of `keys` that a user writes: one that no framework spells is our own word, as for a recipe."""
    known = load_keys()
    return {key for key in keys if key not in known or known[key].spelling}


def _assumption(dialect: Dialect, unread: Collection[str]) -> Assumption | None:
    if not unread:
        return None
    keys = sorted(unread)
    names = [dialect.spelling(key) for key in keys[:_SHOWN]]
    if len(keys) > _SHOWN:
        names.append(f"{len(keys) - _SHOWN} more")
    *first, last = names
    named = f"{', '.join(first)} and {last} have values" if first else f"{last} has a value"
    return Assumption(
        f"{named} that only the start of the run knows, so {'defaults count' if first else 'its default counts'}",
        About.UNREAD_VALUE,
        dialect.size_override(*keys[:_SHOWN]),
    )
