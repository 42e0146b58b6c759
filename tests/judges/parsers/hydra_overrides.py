# SPDX-License-Identifier: Apache-2.0
"""Hydra's overrides, and our reader's values of them."""

from random import Random
from typing import Any

from skill_tools.configs import hydra

KEYS = ["model.lr", "a", "trainer.fsdp_config.param_offload", "a-b.c", "x_1", "data@pkg", "1a", "a..b"]
VALUES = [
    "00", "007", "0", "10", "-1", "+3", "1_000", "1__0", "_1", "1_", "0_0", "0x10", "1e3", "1e-4", "1.5", "1.",
    ".5", "1.e5", "00.5", "01e2", "-.5", "inf", "-INF", "nan", "-nan", "NaN", "1_0.5", "1.5_0", "true", "True",
    "TRUE", "tRue", "false", "null", "NULL", "none", "None", "yes", "on", "off", "text", "some/path", "a-b",
    "a b", " a ", "a  b c", "'x y'", "\"x\"", "'it\\'s'", "\"a\\\\\"", "''", "[1,2]", "[a, 'b']", "[]", "{}",
    "{a:1}", "{a: {b: [1,2]}}", "{'a b': 1}", "{1: x}", "{null: x}", "{true: 1, 1.5: 2}", "[1", "{a}", "1,2",
    "a,b", "", "  ", "a=b", "a:b", "http://x.y/z", "x@y", "?", "???", "*", "%d", "a\\,b", "\\[x\\]", "\\ a",
    "a\\b", "a\\\\b", "$x", "é", "a#b", "!x", "~", "&", "a;b", "1 2", "true false", "10 text", "null x", "+", "-",
    ".", "e5", "5e", "1e", "1e+5", "[1,,2]", "[1,]", "{a:1,}", "(1)", "[true,null,1.5,'a']", "[[1],[2,[3]]]",
    "a|b", "<x>", "\"a'b\"", "'a\"b'", "'\\''", "x'y", "'x'y", "x 'y'", "\t1", "1\t",
]  # fmt: skip
NOISE = [*"0_.-+,:[]{}'\"\\ \t=ae1", "00", "true", "null"]
TABLE = [{"text": f"actor.fsdp_config.param_offload={value}"} for value in VALUES] + [
    {"text": text} for text in ("+a=1", "++a=1", "~a", "~a=1", "a", "+a", "a.b")
]


def question(random: Random) -> dict[str, Any]:
    """Return one override."""
    value = random.choice(VALUES)
    if random.random() < 0.5:
        at = random.randrange(len(value) + 1)
        value = value[:at] + random.choice(NOISE) + value[at + random.randint(0, 1) :]
    sign = random.choice(["", "", "", "+", "++", "~"])
    key = random.choice(KEYS[:5] if random.random() < 0.95 else KEYS)
    return {"text": f"{sign}{key}={value}"}


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return sign, key and value."""
    found = hydra.parse_override(asked["text"])
    return [found.sign, found.key, found.value]
