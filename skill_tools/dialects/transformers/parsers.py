# SPDX-License-Identifier: Apache-2.0
"""Each parser's value of an argument, and the full name of an abbreviated option.

An option goes through argparse (`HfArgumentParser`), which knows any unique abbreviation, and `string_to_bool`. A
recipe does so in `TrlParser`, whose values are argparse's defaults. `HfArgumentParser.parse_yaml_file` passes each
value on unchanged, as a call in Python does: there any text is true, and none is a number. ms-swift and LLaMA-Factory
parse with the same class.
Facts: transformers/hf_argparser.py of 4.51.3 to 5.23.0, trl/scripts/utils.py::TrlParser of 1.16.0.
"""

from collections.abc import Iterable
from enum import Enum

from skill_tools.configs.draft import Draft
from skill_tools.configs.values import UNREADABLE, is_template
from skill_tools.configs.yaml_lines import Node
from skill_tools.dialects.transformers import TRANSFORMERS

TRUE = frozenset({"yes", "true", "t", "y", "1"})
FALSE = frozenset({"no", "false", "f", "n", "0"})
_MAY_BE_NULL = frozenset({"bf16", "activation_checkpointing"})  # the class decides then
TRUTH = "yes, true, t, y, 1, no, false, f, n or 0"
_NUMBER = "a number without quotes, since nothing converts text here"


class Parser(Enum):
    """A value's reader: argparse, a call that takes it unchanged, or a recipe with an unknown parser."""

    ARGPARSE = "argparse"
    CALL = "call"
    RECIPE = "recipe"


def given(draft: Draft, name: str, node: Node, parser: Parser) -> Node:
    """Return the value of an argument that is true or false, as `parser` hands it on; any other as it is."""
    key, value = draft.key(name), node.value
    if key is None or key.type_in(draft.framework) != "bool" or value is UNREADABLE:
        return node
    if value is None:
        return node if key.name in _MAY_BE_NULL else node._replace(value=False)
    if isinstance(value, str) and is_template(value):
        return node
    if parser is Parser.CALL:
        return node._replace(value=bool(value))
    lowered = value.lower() if isinstance(value, str) else ""
    if lowered in FALSE:
        return node._replace(value=False if parser is Parser.ARGPARSE else UNREADABLE)
    return node._replace(value=True) if lowered in TRUE else node


def expected(draft: Draft, name: str, node: Node, parser: Parser) -> str | None:
    """Return the expectation of a value that `given` left as text although no run can use it, else None."""
    key, value = draft.key(name), node.value
    if key is None or not isinstance(value, str) or is_template(value):
        return None
    kind = key.type_in(draft.framework)
    if parser is Parser.ARGPARSE:
        return TRUTH if kind == "bool" else None
    return _NUMBER if parser is Parser.CALL and kind in ("int", "float") else None


def meant(name: str, names: Iterable[str]) -> str:
    """Return the full name of an abbreviated option: the only name with this start, else `name` itself.

    An argument with an underscore is known with dashes too, so that a start before the first one fits two options.
    """
    start = name.replace("-", "_")
    longer = [each for each in names if each.startswith(start) and "." not in each]
    is_mixed = "-" in name and "_" in name
    if len(longer) != 1 or is_mixed or ("_" in longer[0] and "_" not in start):
        return name
    return longer[0]


def has_negative(draft: Draft, name: str) -> bool:
    """Return whether argparse may have `--no_NAME`: it has where the class, maybe unknown, has true by default."""
    key = draft.key(name)
    if key is None or key.name in _MAY_BE_NULL:
        return key is None
    return key.default.get(draft.framework, key.default.get(TRANSFORMERS)) is not False
