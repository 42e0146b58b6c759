# SPDX-License-Identifier: Apache-2.0
"""Plain values that know their line and column, as YAML, JSON and TOML give them.

Apart from the parsers because readers of JSON files and scripts work with such values too, and importing PyYAML takes
an eighth of a lint.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from skill_tools.errors import UnusableInput

MAX_DEPTH = 64
MAX_NODES = 100_000


class Loader(Enum):
    """The loader that turns a text into values; the members are loaders of one release or another."""

    SAFE = "PyYAML's safe loader"
    FULL = "PyYAML's full loader"
    OMEGACONF_2_3 = "OmegaConf before 2.4"
    OMEGACONF_2_4 = "OmegaConf 2.4"


IN_PYTHON = frozenset({Loader.SAFE, Loader.FULL, Loader.OMEGACONF_2_3})
ON_LIBYAML = frozenset({Loader.OMEGACONF_2_4})
OMEGACONF = frozenset({Loader.OMEGACONF_2_3, Loader.OMEGACONF_2_4})


class Refusal(NamedTuple):
    """A place that some loaders refuse, with the run's error."""

    loaders: frozenset[Loader]
    line: int
    error: UnusableInput


class Doubt(NamedTuple):
    """A place that releases of PyYAML read differently, and how."""

    line: int
    column: int
    text: str


class Documents(list["Node"]):
    """The root of every document of a text; `refusals` and `doubts` are in the order of the text."""

    def __init__(
        self, roots: Iterable["Node"] = (), refusals: Sequence[Refusal] = (), doubts: Sequence[Doubt] = ()
    ) -> None:
        super().__init__(roots)
        self.refusals, self.doubts = list(refusals), list(doubts)


class Node(NamedTuple):
    """A value and its place, from 1: in a mapping that of its key, else its own.

    `value` is a scalar, `list[Node]` or `dict[str, Node]`; `text` is a scalar as it was written, `bare` without quotes
    and tag. `shadowed` holds the earlier values of a duplicate key, `size` and `height` those of its expansion.
    """

    value: object
    line: int
    column: int
    text: str | None = None
    shadowed: tuple["Node", ...] = ()
    size: int = 1
    height: int = 0
    bare: bool = False


def plain(node: Node) -> object:
    """Return the node's value without places: nested lists and dicts of scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def as_omegaconf(node: Node) -> Node:
    """Return the tree as OmegaConf loads it: a bare `1e-4`, which YAML 1.1 has as text, is a number."""
    value = node.value
    if isinstance(value, dict):
        value = {key: as_omegaconf(child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [as_omegaconf(child) for child in value]
    elif node.bare and isinstance(value, str):
        from skill_tools.configs.yaml_scalars import omegaconf_float

        number = omegaconf_float(value)
        value = value if number is None else number
    if value is node.value and not node.shadowed:
        return node
    return node._replace(value=value, shadowed=tuple(map(as_omegaconf, node.shadowed)))
