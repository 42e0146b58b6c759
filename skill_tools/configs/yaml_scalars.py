"""Turns the text of a YAML scalar into a plain value, as each framework's own loader would.

Axolotl loads with PyYAML's safe loader (YAML 1.1: `yes` is true, `1e-4` is a string); Megatron Bridge loads with
OmegaConf, which adds a wider grammar for floats (`1e-4` is a number) and leaves dates as text. PyYAML's own
constructors do the conversion; what they cannot convert stays text.
"""

import re

import yaml

_STR = "tag:yaml.org,2002:str"
_PREFIX = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float")}
_OMEGACONF_FLOAT = re.compile(r"[-+]?\d+(?:_\d+)*(?:\.[\d_]*)?(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]\d+)?")
_LONGEST_NUMBER = 100  # characters; `1:1:1...` is a number to YAML 1.1, whose value takes time by the square
_RESOLVERS = yaml.SafeLoader.yaml_implicit_resolvers
_CONSTRUCTOR = yaml.constructor.SafeConstructor()

Scalar = None | bool | int | float | str


def resolve(text: str, *, tag: str | None, plain: bool) -> Scalar:
    """Return the value of one scalar: `tag` is the explicit tag if any, `plain` whether it is unquoted.

    Unknown tags and dates give the text itself.
    """
    if tag is None or tag == "!":
        if not plain:
            return text
        tag = _implicit_tag(text)
    if tag not in _PLAIN_TAGS or len(text) > _LONGEST_NUMBER:
        return text
    return _construct(tag, text)


def _implicit_tag(text: str) -> str:
    for tag, pattern in _RESOLVERS.get(text[:1], ()):
        if pattern.match(text):
            return str(tag)
    return _STR


def omegaconf_float(text: str) -> float | None:
    """Return the number that OmegaConf reads in a bare scalar which YAML 1.1 leaves as text."""
    is_float = ("." in text or "e" in text.lower()) and _OMEGACONF_FLOAT.fullmatch(text) is not None
    return float(text.replace("_", "")) if is_float else None


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
            case _:
                return None
    except (ValueError, KeyError, IndexError):
        return text
