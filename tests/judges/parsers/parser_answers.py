# SPDX-License-Identifier: Apache-2.0
"""The form in which a parser and a reader of ours answer, so that the two can be compared: plain JSON.

An answer is `{"value": ..}` or `{"raised": text}`. A float is `{"float": repr}`, a mapping
`{"map": [[key, value], ..]}` in the order of its keys, and values left by our readers as the file's text (a date,
bytes) are `{"text": ..}`.
"""

from typing import Any

Answer = dict[str, Any]


def encoded(value: Any) -> Any:
    """Return a value in that form; keys that are no text are `{"key": ..}`."""
    if isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value):
        return f"surrogates {value!a}"  # JSON would join two halves on the way
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, dict):
        pairs = [
            [name if isinstance(name, str) else {"key": encoded(name)}, encoded(each)]
            for name, each in value.items()
        ]
        return {"map": sorted(pairs, key=repr)}
    if isinstance(value, set):
        return encoded(dict.fromkeys(value))
    if isinstance(value, list | tuple):
        return [encoded(each) for each in value]
    return {"text": str(value)}


def agree(real: Answer, ours: Answer) -> bool:
    """Return whether our answer is the real one; a reader that says it is unknown is wrong as well."""
    if "raised" in real or "raised" in ours:
        return "raised" in real and "raised" in ours
    return _same(real["value"], ours["value"])


def _same(real: Any, ours: Any) -> bool:
    if isinstance(real, list):
        return isinstance(ours, list) and len(real) == len(ours) and all(map(_same, real, ours))
    if isinstance(real, dict) and "text" in real:
        return isinstance(ours, str)
    if isinstance(real, dict) and "map" in real:
        if not isinstance(ours, dict) or "map" not in ours or len(ours["map"]) != len(real["map"]):
            return False
        held = {name_of(name): value for name, value in ours["map"]}
        return all(name_of(name) in held and _same(value, held[name_of(name)]) for name, value in real["map"])
    return type(real) is type(ours) and bool(real == ours)


def name_of(name: Any) -> str:
    """Return a key as text; ours are the texts in the file, whatever the parser makes of them."""
    import yaml

    if isinstance(name, dict):
        return repr(name["key"])
    try:
        read = yaml.safe_load(name) if name.strip() == name and name != "<<" else name
    except Exception:
        read = name
    return repr(encoded(read)) if not isinstance(read, str | dict | list) else repr(name)
