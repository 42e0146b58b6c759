# SPDX-License-Identifier: Apache-2.0
"""Looks a model up by name in `knowledge/models.yaml`: for `--model`, a base model or a recipe.

Names are compared word by word (`Qwen/Qwen3-30B-A3B` and `qwen3_30b_a3b_pretrain_config` both name `qwen3-30b-a3b`). A
name means a model if it is one of its names and neutral words alone: `DeepSeek-R1-Distill-Qwen-7B` is no
`deepseek-r1`. Of a path, the last part that says anything is the name.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from skill_tools import knowledge
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest
from skill_tools.started import COMMAND

_NOT_SHAPE = ("names", "parameters", "tower", "fused_experts")
_FILE_ENDING = r"\.(json|ya?ml|toml|sh|py|gguf|safetensors|bin)$"


def entries() -> dict[str, dict[str, Any]]:
    """Return the models as they stand in the knowledge file."""
    models: dict[str, dict[str, Any]] = knowledge.index()["models"]
    return models


def shape(name: str) -> ModelShape:
    """Return the shape of the model called exactly `name` in the knowledge file."""
    entry = entries()[name]
    return ModelShape(name=name, **{key: value for key, value in entry.items() if key not in _NOT_SHAPE})


@cache
def find(text: str) -> str | None:
    """Return the known model that `text` names (a hub id, a recipe, a path), or None."""
    return next((_exact(words, _aliases()) for words in _names_in(text)), None)


@cache
def untold(text: str) -> str:
    """Return the layers without a shape here, of the model named in `text`; empty for an unknown one."""
    return next((_exact(words, _untold()) or "" for words in _names_in(text)), "")


def similar(text: str) -> str | None:
    """Return the known model in `text` if further words than neutral ones may mean another shape."""
    for words in _names_in(text):
        return next((model for _, model in _aliases_in(words, _aliases())), None)
    return None


def _names_in(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of the model's name in `text`: of a path, the last part that is not all neutral."""
    for part in reversed(re.split(r"[/\\]+", text.lower().strip())):
        words = tuple(filter(None, re.split(r"[-_:@\s]+", re.sub(_FILE_ENDING, "", part))))
        if not all(map(_is_neutral, words)):
            yield words
            return


def _exact(words: Sequence[str], aliases: dict[tuple[str, ...], str]) -> str | None:
    """Return the model of the longest alias in `words`, if the other words are neutral."""
    for alias, model in _aliases_in(words, aliases):
        start = _starts(words, alias)[0]
        rest = (*words[:start], *words[start + len(alias) :])
        return model if all(map(_is_neutral, rest)) else None
    return None


def _aliases_in(
    words: Sequence[str], aliases: dict[tuple[str, ...], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the aliases that stand in `words`, the longest first."""
    found = (each for each in aliases.items() if each[0][0] in words and _starts(words, each[0]))
    yield from sorted(found, key=lambda each: len("-".join(each[0])), reverse=True)


def _starts(words: Sequence[str], alias: tuple[str, ...]) -> list[int]:
    return [at for at in range(len(words)) if tuple(words[at : at + len(alias)]) == alias]


@cache
def _is_neutral(word: str) -> bool:
    """Return whether `word` says nothing of a model's sizes."""
    return _neutral().fullmatch(word) is not None


@knowledge.derived
def _neutral() -> re.Pattern[str]:
    return re.compile("|".join(knowledge.index()["model_names"]["neutral"]))


@knowledge.derived
def _aliases() -> dict[tuple[str, ...], str]:
    """Return each name of a known model, as words."""
    return {
        tuple(alias.split("-")): model
        for model, entry in entries().items()
        for alias in (model, *entry["names"])
    }


@knowledge.derived
def _untold() -> dict[tuple[str, ...], str]:
    """Return each name of a model without a shape, as words, with the layers that are the reason."""
    kinds: dict[str, list[str]] = knowledge.index()["model_names"]["untold"]
    return {tuple(name.split("-")): layers for layers, names in kinds.items() for name in names}


def counted_kinds() -> list[str]:
    """Return the kinds of config.json whose parameters this tool counts as transformers does."""
    kinds: list[str] = knowledge.index()["model_names"]["counted"]
    return kinds


def of_size(parameters: int) -> str | None:
    """Return the known model that has `parameters`, else the only one within a thousandth of them, else None."""
    off_by = {name: abs(entry["parameters"] - parameters) for name, entry in entries().items()}
    for most in (0, parameters // 1000):
        close = [name for name, off in off_by.items() if off <= most]
        if close:
            return close[0] if len(close) == 1 else None
    return None


def require(text: str) -> ModelShape:
    """Return the shape that `text` names, or raise `UnusableInput` with the nearest known names."""
    name = find(text)
    if name is None:
        raise unknown(text)
    return shape(name)


def unknown(text: str) -> UnusableInput:
    """Return the error for a name that means no known model, with the known models of its family."""
    shown = repr(text[:100])
    if layers := untold(text):
        return UnusableInput(
            f"model {shown} has {layers}, which no shape of this tool describes",
            expected="such a model traced",
            attempt=f"{COMMAND} trace config.json --out profile.json, then --trace profile.json",
        )
    if (near := similar(text)) is not None:
        return UnusableInput(
            f"model {shown} is not known; its name only contains {near}",
            expected="its own config.json or folder, or the known model that has its sizes",
            attempt=f"--model {near} if it has that model's sizes",
        )
    alike = _alike(text)
    these = f" ({', '.join(alike)}, ...)" if alike else ""
    or_one = f", or --model {alike[0]} if that is meant" if alike else ""
    return UnusableInput(
        f"model {shown} has no known shape",
        expected=f"a known model{these} or a config.json of the model",
        attempt=f"the model's Hugging Face config.json as a second file{or_one}",
    )


def _alike(text: str) -> list[str]:
    """Return the known models with a name much like that in `text`; none for a model of another family."""
    words = next(_names_in(text), ())
    return nearest("-".join(word for word in words if not _is_neutral(word)), entries())
