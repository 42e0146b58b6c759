"""Finds releases that an input states itself, in a comment or a `pip install` line: `megatron-core==0.16.1`."""

import re

_STATED = re.compile(
    r"(?<![\w.-])(megatron[-_]core|megatron[-_]bridge|transformer[-_]engine|torch|axolotl|deepspeed)"
    r"(?:\[[\w,-]*\])?==v?(\d[\w.+!]*)",
    re.IGNORECASE,
)


def stated_versions(text: str) -> dict[str, str]:
    """Return distribution name to version; only an exact `==` states one, and the last statement counts."""
    return {name.lower().replace("_", "-"): version.rstrip(".") for name, version in _STATED.findall(text)}
