# SPDX-License-Identifier: Apache-2.0
"""The modules of one lint: a module that it does not need costs each lint of each user a millisecond or more."""

import subprocess
import sys
from pathlib import Path

import pytest

from skill_tools.bundle import root
from skill_tools.dialects import registry

# By room of skill_tools, whatever the file.
ALWAYS = {
    "": "__main__ bundle errors knowledge nearest started terminal",
    "commands": "lint lint_output lint_settings releases",
    "configs": "config draft files folder keys releases source tree values vocabulary yaml_lines",
    "dialects": "base inside not_read read registry slime",
    "dialects.megatron": "core",  # whose fields its two dialects look for
    "reports": "blocks findings",
    "rules": (
        "conditions finding fixes input_checks knowledge lint messages operations predicates remedies selection "
        "suppress values versions"
    ),
}
YAML = {"configs": "yaml_events yaml_scalars"}
SHELL_WORDS = {
    "configs.shell": "command launch"
}  # the writer of an environment; the shell's reader is another
SECTION = {"dialects.deepspeed": "dialect section"}
# A dialect whose marks the text has is asked, and no more of it is loaded.
DIALECTS = {type(registry.named(name)).__module__ for name in registry.names()}

MODEL = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nlearning_rate: 1.0e-5\nmax_steps: 9\n"
SCRIPT = "from transformers import TrainingArguments\nargs = TrainingArguments('o', max_steps=9)\n"
FILES = {
    "bridge.yaml": (
        "model: {num_layers: 32, cpu_offloading: true}\noptimizer: {optimizer_cpu_offload: true}\n",
        # Overrides are read as Hydra reads them, where a command has some.
        [YAML, {"configs": "hydra", "dialects.megatron": "bridge_compose bridge_inputs"}],
    ),
    "axolotl.yaml": (
        "base_model: Qwen/Qwen3-8B\nadapter: lora\nlayer_offloading: true\nmicro_batch_size: 1\n",
        [YAML, SHELL_WORDS, SECTION, {"dialects.axolotl": "compose options"}],
    ),
    "trainer.yaml": (
        MODEL,
        [
            {**YAML, **SHELL_WORDS, **SECTION, "dialects": "patch"},
            {"dialects.transformers": "arguments compose launch parsers"},
        ],
    ),
    "ds_z3.json": (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}}',
        [SHELL_WORDS, {"configs": "json_lines position", "dialects.deepspeed": "compose section"}],
    ),
    "train.py": (
        SCRIPT,
        [
            SHELL_WORDS,
            SECTION,
            {"configs.python": "constructions statements syntax values", "dialects": "fields"},
            {"dialects.transformers": "arguments classes compose launch our_line parsers python_script"},
        ],
    ),
}  # fmt: skip
HEAVY = {"ast", "dataclasses", "difflib", "inspect", "logging", "shlex", "subprocess", "tempfile", "tomllib"}


def names(rooms: dict[str, str]) -> set[str]:
    return {
        ".".join(filter(None, ("skill_tools", room, module)))
        for room, modules in rooms.items()
        for module in modules.split()
    }


@pytest.mark.parametrize("name", FILES)
def test_a_lint_loads_no_more_than_its_file_needs(name: str, tmp_path: Path) -> None:
    text, needed = FILES[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    program = (
        "import sys; before = set(sys.modules); from skill_tools.__main__ import main\n"
        "code = main(['lint', sys.argv[1]]); print(code, 'LOADED', *set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=root(), capture_output=True, text=True, check=True
    )
    said, _, listed = done.stdout.partition("LOADED")
    assert said.split()[-1] in {"0", "1"}, done.stderr
    loaded = set(listed.split())
    allowed = names(ALWAYS).union(*map(names, needed))
    rooms = {name.rpartition(".")[0] for name in allowed}
    ours = {each for each in loaded if each.startswith("skill_tools.")} - allowed - rooms
    assert {each for each in ours if not _only_asks(each)} == set()
    assert loaded & HEAVY == (HEAVY & {"ast"} if name.endswith(".py") else set())
    assert ("yaml" in loaded) is name.endswith(".yaml"), "importing PyYAML takes an eighth of a lint"


def _only_asks(module: str) -> bool:
    """Return whether a module is a dialect's own, which is small and loads the others when they are needed."""
    return module in DIALECTS or any(dialect.startswith(f"{module}.") for dialect in DIALECTS)
