# SPDX-License-Identifier: Apache-2.0
"""Texts in YAML and JSON, most of them valid, and our reader's values of them."""

import json
from pathlib import Path
from random import Random
from typing import Any

import yaml

from skill_tools.configs.source import Source
from skill_tools.configs.tree import SAFE, single_document
from skill_tools.configs.yaml_lines import OMEGACONF, plain

_PIECES = json.loads(Path(__file__).with_name("yaml_pieces.json").read_text(encoding="utf-8"))
KEYS, SCALARS, BLOCKS, NOISE = (_PIECES[name] for name in ("keys", "scalars", "blocks", "noise"))
TABLE, JSON_TABLE = _PIECES["table"], _PIECES["json_table"]


def _is_read(scalar: str) -> bool:
    try:
        yaml.safe_load(f"key: {scalar}")
    except Exception:
        return False
    return True


READ, REFUSED = ([each for each in SCALARS if _is_read(each) is wanted] for wanted in (True, False))


def question(random: Random) -> dict[str, Any]:
    """Return one text in YAML."""
    lines: list[str] = []
    anchors: list[str] = []
    _mapping(random, lines, anchors, 0)
    text = "\n".join(lines) + random.choice(["\n", "", "\n# end\n"])
    if random.random() < 0.3:
        for _ in range(random.randint(1, 2)):
            at = random.randrange(len(text) + 1)
            text = text[:at] + random.choice([*NOISE, ""]) + text[at + random.randint(0, 1) :]
    return {"text": text}


def omegaconf_question(random: Random) -> dict[str, Any]:
    """Return one text in YAML other than a single text: OmegaConf makes a key of that."""
    while True:
        asked = question(random)
        try:
            if not isinstance(yaml.safe_load(asked["text"]), str):
                return asked
        except Exception:
            return asked


def _scalar(random: Random) -> str:
    return random.choice(REFUSED if random.random() < 0.02 else READ)


def _mapping(random: Random, lines: list[str], anchors: list[str], depth: int) -> None:
    pad = "  " * depth
    names = random.sample(KEYS, random.randint(1, 5))
    if random.random() < 0.05:
        names.append(random.choice(names))
    for name in names:
        key = random.choice([name] * 12 + [f'"{name}"', f"'{name}'", f"? {name}\n{pad}"])
        if name == names[0] and random.random() < 0.1:
            key = random.choice(["on", "22", "null", "2026-01-01"])
        gap = random.choice([" "] * 60 + ["  ", "\t", " \t"])
        comment = random.choice([""] * 40 + ["  # note"] * 8 + ["  # note", "\t# note"])
        kind = random.random()
        if kind < 0.16 and depth < 3:
            anchor = f"&{name}{len(anchors)}" if random.random() < 0.6 else ""
            lines.append(f"{pad}{key}: {anchor}".rstrip())
            _mapping(random, lines, anchors, depth + 1)
            if anchor:
                anchors.append(anchor[1:])
        elif kind < 0.22 and anchors:
            lines.append(f"{pad}{key}: *{random.choice(anchors)}")
        elif kind < 0.34 and anchors:
            chosen = [f"*{random.choice(anchors)}" for _ in range(random.randint(1, 3))]
            lines.append(f"{pad}<<: {chosen[0] if random.random() < 0.5 else '[' + ', '.join(chosen) + ']'}")
        elif kind < 0.4:
            lines += [
                f"{pad}{key}:",
                *(f"{pad}- {_scalar(random)}" for _ in range(random.randint(1, 3))),
            ]
        elif kind < 0.46:
            lines.append(f"{pad}{key}: {random.choice(BLOCKS).replace('{pad}', pad + '  ')}")
        else:
            lines.append(f"{pad}{key}:{gap}{_scalar(random)}{comment}")


def json_question(random: Random) -> dict[str, Any]:
    """Return one text in JSON, sometimes with words that JSON does not have."""
    text = json.dumps(
        _value(random, 0, wants_map=True), indent=random.choice([None, 2]), ensure_ascii=random.random() < 0.5
    )
    if random.random() < 0.4:
        at = random.randrange(len(text))
        pieces = [
            "NaN",
            "-Infinity",
            "1e5",
            "01",
            "\\ud800",
            "\t",
            "\\u12",
            ",",
            "'",
            "}",
            "]",
            "1.",
            "nul",
            "//x",
            "\x01",
            "\u2028",
            "-",
            "+1",
        ]
        text = text[:at] + random.choice(pieces) + text[at + random.randint(0, 1) :]
    return {"text": text}


def _value(random: Random, depth: int, *, wants_map: bool = False) -> Any:
    kind = random.randint(0, 9)
    if wants_map or (kind == 0 and depth < 4):
        return {
            random.choice([*KEYS, "é", "a b", ""]): _value(random, depth + 1)
            for _ in range(random.randint(0, 5))
        }
    if kind == 1 and depth < 4:
        return [_value(random, depth + 1) for _ in range(random.randint(0, 4))]
    return random.choice(
        [
            None,
            True,
            False,
            0,
            -1,
            10**20,
            1.5,
            -0.0,
            1e300,
            1e-7,
            float("nan"),
            float("inf"),
            "auto",
            "",
            "true",
            "1",
            "\ud83d",
            "\U0001f600",
            'é\n\t\\/"',
        ]
    )


def ours_safe(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's value of a text for a framework that loads with PyYAML."""
    source = Source("config.yaml", asked["text"]).stating(lambda: {"pyyaml": release})
    return plain(single_document(source, SAFE))


def ours_omegaconf(asked: dict[str, Any], release: str) -> Any:
    """Return its value of a text for a framework that loads with OmegaConf."""
    stated = {"pyyaml": "6.0.3", "omegaconf": release}
    return plain(single_document(Source("config.yaml", asked["text"]).stating(lambda: stated), OMEGACONF))


def ours_json(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's value of JSON; it refuses texts that only looser readers take."""
    from skill_tools.dialects.deepspeed.section import not_json

    source = Source("config.json", asked["text"])
    if not_json(source.text):
        raise ValueError("not JSON")
    return plain(single_document(source))
