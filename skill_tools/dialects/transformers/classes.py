# SPDX-License-Identifier: Apache-2.0
"""The names that each argument class accepts, from `knowledge/vocabulary/transformers_classes.txt`.

Apart because only Python scripts name a class, and a lint of a recipe does not pay for the list.
"""

from skill_tools import knowledge
from skill_tools.dialects.transformers import TRAINER_CLASSES
from skill_tools.nearest import nearest as names_nearest

OF_SCRIPTS = (
    "ScriptArguments",
    "ModelConfig",
    "DatasetMixtureConfig",
)  # of TRL's scripts, beside the trainer's
GONE = frozenset(
    {"evaluation_strategy"}
)  # arguments of releases before the known ones, with a rule of their own
_BASE = "TrainingArguments"
_SHOWN = 3
_LIKENESS = 0.7


def accepted(name: str) -> frozenset[str]:
    """Return the fields of the class `name` in any known release; its subclasses may have more."""
    of_class = _fields()
    every = of_class.get(name, frozenset())
    return every if name == _BASE else every | of_class[_BASE]


def takes(name: str, field: str) -> bool:
    """Return whether the class `name` has `field` in any known release, as one that is not known may have."""
    return name not in _fields() or field in accepted(name)


def nearest(name: str, field: str) -> tuple[str, ...]:
    """Return the fields of the class `name` that the unknown `field` may mean."""
    return tuple(names_nearest(field, accepted(name), count=_SHOWN, likeness=_LIKENESS))


def is_trl(name: str) -> bool:
    """Return whether TRL has the class `name`."""
    return name in _fields() and name not in TRAINER_CLASSES


@knowledge.derived
def _fields() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for line in knowledge.names("transformers_classes"):
        name, _, field = line.partition(".")
        found.setdefault(name, set()).add(field)
    return {name: frozenset(fields) for name, fields in found.items()}
