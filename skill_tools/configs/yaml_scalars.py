# SPDX-License-Identifier: Apache-2.0
"""Turns the text of a YAML scalar into a plain value, as each framework's own loader would.

Axolotl loads with PyYAML's safe loader (YAML 1.1: `yes` is true, `1e-4` is a string); Megatron Bridge loads with
OmegaConf, which adds a wider grammar for floats (`1e-4` is a number) and leaves dates as text. PyYAML's own
constructors do the conversion; their refusals are refusals here.
"""

import re

import yaml

_STR = "tag:yaml.org,2002:str"
_PREFIX = "tag:yaml.org,2002:"
_NULL, _TIMESTAMP = f"{_PREFIX}null", f"{_PREFIX}timestamp"
_PLAIN_TAGS = {f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "timestamp")}
_TEXT_TAGS = frozenset({_STR, f"{_PREFIX}binary"})
_OMEGACONF_FLOAT = re.compile(
    r"[-+]?\d+(?:_\d+)*\.[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d+(?:_\d+)*[eE][-+]?\d+|\.\d+(?:_\d+)*(?:[eE][-+]\d+)?"
    r"|[-+]?\d+(?:_\d+)*(?::[0-5]?\d)+\.[\d_]*",
    re.ASCII,
)  # omegaconf/_utils.py::get_yaml_loader of 2.3.0, _yaml.py of 2.4.0
_LONGEST_NUMBER = 100  # characters; `1:1:1...` is a number to YAML 1.1, whose value takes time by the square
_RESOLVERS = yaml.SafeLoader.yaml_implicit_resolvers
_CONSTRUCTOR = yaml.constructor.SafeConstructor()

Scalar = None | bool | int | float | str


class RefusedError(Exception):
    """No value can be made of a scalar; `is_date`: the text is a date outside the calendar."""

    def __init__(self, problem: str, *, is_date: bool = False) -> None:
        super().__init__(problem)
        self.is_date = is_date


def resolve(text: str, *, tag: str | None, plain: bool) -> Scalar:
    """Return the value of one scalar: `tag` is the explicit tag if any, `plain` whether it is unquoted.

    A date gives the text itself. Raises `RefusedError` where PyYAML's safe loader makes no value.
    """
    if tag is None or tag == "!":
        if not plain:
            return text
        tag = _implicit_tag(text)
    if tag in _TEXT_TAGS:
        return text
    if tag not in _PLAIN_TAGS:
        raise RefusedError(f"could not determine a constructor for the tag {shown_tag(tag)}")
    return text if len(text) > _LONGEST_NUMBER else _construct(tag, text)


def is_date(text: str) -> bool:
    """Return whether YAML 1.1 reads a bare text as a date."""
    return _implicit_tag(text) == _TIMESTAMP


def shown_tag(tag: str) -> str:
    """Return a tag as it is written in a text: `!!python/tuple`."""
    return f"!!{tag.removeprefix(_PREFIX)}" if tag.startswith(_PREFIX) else tag


def _implicit_tag(text: str) -> str:
    for tag, pattern in _RESOLVERS.get(text[:1], ()):
        if pattern.match(text):
            return str(tag)
    return _STR


def omegaconf_float(text: str) -> float | None:
    """Return OmegaConf's number for a bare scalar that is text in YAML 1.1."""
    is_float = ("." in text or "e" in text.lower()) and _OMEGACONF_FLOAT.fullmatch(text) is not None
    return float(_CONSTRUCTOR.construct_yaml_float(yaml.ScalarNode(_STR, text))) if is_float else None


def _construct(tag: str, text: str) -> Scalar:
    node = yaml.ScalarNode(tag, text)
    try:
        match tag.removeprefix(_PREFIX):
            case "bool":
                return bool(_CONSTRUCTOR.construct_yaml_bool(node))
            case "int":
                return int(_CONSTRUCTOR.construct_yaml_int(node))
            case "float":
                return float(_CONSTRUCTOR.construct_yaml_float(node))
            case "timestamp":
                _CONSTRUCTOR.construct_yaml_timestamp(node)
                return text
            case _:
                return None
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        what = f"{text!r} is no {tag.removeprefix(_PREFIX)}"
        raise RefusedError(what, is_date=tag == _TIMESTAMP) from error
