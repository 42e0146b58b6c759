"""Renders a mechanism's recommended settings in each framework's own spelling.

Dotted overrides for Megatron Bridge, flags for Megatron-LM, YAML for Axolotl; environment variables as
`export` lines before the command that reads them.
"""

import json
from collections.abc import Mapping

from skill_tools.card.load import Card

Settings = Mapping[str, object]


def path_blocks(card: Card) -> dict[str, str]:
    """Return the blocks `path-MECHANISM`: one fenced block a framework that has the mechanism."""
    return {
        f"path-{mechanism}": "\n\n".join(
            f"{_TITLES[framework]}:\n\n```{_LANGUAGES[framework]}\n{as_text(framework, settings)}\n```"
            for framework, settings in frameworks.items()
        )
        for mechanism, frameworks in card["recommended_path"].items()
    }


def as_text(framework: str, settings: Settings) -> str:
    """Return the settings as the framework's user writes them, one a line."""
    exports = [f"export {key[4:]}={value}" for key, value in settings.items() if key.startswith("env.")]
    own = {key: value for key, value in settings.items() if not key.startswith("env.")}
    write = {"megatron-bridge": _override, "megatron-lm": _flag, "axolotl": _yaml}[framework]
    return "\n".join([*exports, *(write(key, value) for key, value in own.items())])


_TITLES = {
    "megatron-bridge": "Megatron Bridge, as overrides",
    "megatron-lm": "Megatron-LM, as flags",
    "axolotl": "Axolotl, in the YAML",
}
_LANGUAGES = {"megatron-bridge": "text", "megatron-lm": "text", "axolotl": "yaml"}


def _override(key: str, value: object) -> str:
    return f"{key}={_plain(value)}"


def _flag(key: str, value: object) -> str:
    if value is True:
        return key
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    return " ".join([key, *words])


def _yaml(key: str, value: object) -> str:
    return f"{key}: {_plain(value)}"


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(str(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)
