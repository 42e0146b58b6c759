"""The facts, as data, and the one way to their compiled form.

People write YAML; `index.json` is what the commands load, because parsing the YAML would cost more than the
lint or the plan itself. `rules/index.py` writes it. Nothing here interprets a fact.
"""

import json
from functools import cache
from typing import Any

from skill_tools.bundle import knowledge_path


def load_yaml(*parts: str) -> Any:
    """Return one YAML file of this folder as plain data; libyaml, where PyYAML has it, is ten times faster."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(knowledge_path(*parts).read_text(encoding="utf-8"), Loader=loader)


@cache
def index() -> dict[str, Any]:
    """Return `index.json`: `keys`, `rules`, `vocabulary`, `releases`, `models`, `hardware`, as in their sources."""
    loaded: dict[str, Any] = json.loads(knowledge_path("index.json").read_text(encoding="utf-8"))
    return loaded
