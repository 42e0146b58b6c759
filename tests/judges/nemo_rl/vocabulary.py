# SPDX-License-Identifier: Apache-2.0
"""Writes NeMo-RL's vocabulary: the fields of its policy, and the keys of its example configurations.

    python tests/judges/nemo_rl/vocabulary.py build/nemo_rl > skill_tools/knowledge/vocabulary/nemo_rl.txt

The folder holds a folder for each release (`fetch.py`). Nothing of NeMo-RL is imported: the TypedDicts of
`nemo_rl/models/policy/__init__.py` are read as syntax, and the code for keys of the backends' sections that it asks for
by name. Only `policy` and the reward model's environment are listed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

POLICY = Path("nemo_rl/models/policy/__init__.py")
LISTED = ("policy.", "env.reward_model.")
FREE = (
    "policy.generation", "policy.tokenizer", "policy.hf_config_overrides", "policy.optimizer.kwargs",
    "policy.scheduler",
    "policy.draft", "policy.value", "policy.megatron_cfg.model_overrides", "policy.megatron_cfg.optimizer",
    "policy.megatron_cfg.scheduler", "policy.megatron_cfg.env_vars", "policy.dtensor_cfg.env_vars",
    "policy.megatron_cfg.freeze_config", "policy.megatron_cfg.peft", "policy.dtensor_cfg.lora_cfg",
    "policy.dtensor_cfg.automodel_kwargs",
)  # fmt: skip
ASKED = re.compile(
    r'(megatron_cfg|dtensor_cfg)"?\]?(?:\.get\(|\[)\s*"(\w+)"|"(\w+)" (?:not )?in (?:\w+\["|)(megatron_cfg)'
)
HEAD = """# Keys of NeMo-RL's policy and its reward model's environment; `name.*` marks a section that is free or not
# listed.
#
# Source: the TypedDicts of nemo_rl/models/policy, the files in examples/configs, and the keys that the code asks for,
# of NeMo-RL {releases}. Written by tests/judges/nemo_rl/vocabulary.py.
"""


def main() -> None:
    """Print the names of every release in the folder."""
    folders = sorted(folder for folder in Path(sys.argv[1]).iterdir() if (folder / POLICY).is_file())
    names: set[str] = {"policy"}
    sections: set[str] = set()
    for folder in folders:
        names |= set(fields(ast.parse((folder / POLICY).read_text(encoding="utf-8"))))
        names |= set(asked(folder))
        for path in sorted((folder / "examples/configs").glob("*.yaml")):
            root = yaml.safe_load(path.read_text(encoding="utf-8"))
            sections |= {name for name in root if name not in ("policy", "defaults")}
            names |= {name for name in flat(root) if name.startswith(LISTED)}
    kept = {name for name in names if not name.startswith(tuple(f"{free}." for free in FREE))}
    kept |= {f"{free}.*" for free in FREE} | {f"{name}.*" for name in sections - {"env"}}
    print(HEAD.format(releases=", ".join(folder.name for folder in folders)))
    print("\n".join(sorted(kept | {"env.*"})))


def fields(module: ast.Module) -> Iterator[str]:
    """Yield every field below `PolicyConfig`, through the TypedDicts that its annotations name."""
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    pending = [("policy", classes["PolicyConfig"])]
    while pending:
        path, node = pending.pop()
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                name = f"{path}.{field.target.id}"
                yield name
                named = {each.id for each in ast.walk(field.annotation) if isinstance(each, ast.Name)}
                pending += [(name, classes[each]) for each in sorted(named & classes.keys())]


def asked(folder: Path) -> Iterator[str]:
    """Yield the keys of the backends' sections that some module subscripts or gets by name."""
    for path in sorted((folder / "nemo_rl").rglob("*.py")):
        for one, key, tested, other in ASKED.findall(path.read_text(encoding="utf-8")):
            yield f"policy.{one or other}.{key or tested}"


def flat(node: object, prefix: str = "") -> Iterator[str]:
    """Yield each key below `node` by its dotted path."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}{name}"
            yield from flat(value, f"{prefix}{name}.")


if __name__ == "__main__":
    main()
