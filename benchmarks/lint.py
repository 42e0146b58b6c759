# SPDX-License-Identifier: Apache-2.0
"""Measures lint and plan as ratios taken in one run, so that the numbers mean the same on every machine.

    python benchmarks/lint.py

Prints the whole process of a lint and of plans against `python3 -c "import yaml"`, configurations a second in one call,
the time for a folder of files of which few configure a training, and the process of `--help` against a bare
interpreter, in CPU time, because the machine may be shared. Exit code 1 when a limit of the design is missed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 15
CONFIGS = 1000
MOST_TIMES_YAML_IMPORT = 2.5
MOST_TIMES_YAML_IMPORT_OF_A_PLAN = 4.0
FEWEST_CONFIGS_PER_S = 500.0
MIXED_FILES = 1000
MOST_S_FOR_MIXED_FILES = 5.0

SIX_NUMBERS = (
    "num_layers=32 hidden_size=4096 ffn_hidden_size=14336 "
    "num_attention_heads=32 num_query_groups=8 vocab_size=128256"
)
PLANS = {
    "a PyTorch model by name": ["--model", "llama-3-8b"],
    "a PyTorch model by six numbers": ["--framework", "pytorch", "--overrides", SIX_NUMBERS],
    "Megatron Bridge": [str(ROOT / "examples/good_bridge.yaml"), "--model", "qwen3-30b-a3b", "--gpus", "16"],
    "Megatron-LM": [str(ROOT / "examples/good_megatron_lm.sh"), "--model", "llama-3-8b", "--gpus", "16"],
    "Axolotl": [str(ROOT / "examples/good_axolotl.yaml")],
}

CONFIG = """\
model:
  num_layers: {layers}
  cpu_offloading: true
  cpu_offloading_num_layers: {offloaded}
  pipeline_model_parallel_size: {pp}
  recompute_granularity: null
optimizer:
  optimizer_cpu_offload: true
  optimizer_offload_fraction: 0.5
"""

WORKFLOW = "on: [push]\njobs:\n" + "".join(
    f"  job{number}:\n    runs-on: x\n    steps:\n      - uses: actions/checkout@v4\n      - run: make {number}\n"
    for number in range(20)
)
MANIFEST = "apiVersion: apps/v1\nkind: Deployment\nspec:\n  containers:\n" + "".join(
    f"    - name: c{number}\n      image: x:{number}\n      args: [--port, '{number}']\n"
    for number in range(30)
)
LOCK = (
    '{"packages": {' + ", ".join(f'"p{number}": {{"version": "1.{number}"}}' for number in range(2000)) + "}}"
)
SCRIPT = "#!/bin/bash\nset -e\n" + "".join(f"make target{number} --jobs 8\n" for number in range(40))
HYDRA = (
    "defaults: [model: gpt]\nmodel: {num_layers: 12, hidden_size: 768}\noptimizer: {lr: 0.1}\ntrainer: {}\n"
)
MIXED = [
    ("ci.yml", WORKFLOW), ("module.py", ""), ("pod.yaml", MANIFEST), ("module.py", ""), ("package-lock.json", LOCK),
    ("build.sh", SCRIPT), ("conf.yaml", HYDRA), ("module.py", ""), ("pyproject.toml", '[project]\nname = "x"\n'),
]  # fmt: skip


def process_s(command: list[str]) -> float:
    """Return the CPU time of one process, its own and the kernel's; its exit code does not matter here.

    Compiled modules are kept, as they are wherever nothing forbids it: the fastest run compiles none.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime


def fastest_s(commands: list[list[str]], repeats: int) -> list[float]:
    """Return each command's fastest run, taken in turns, so that a busy moment meets all of them alike."""
    rounds = [[process_s(command) for command in commands] for _ in range(repeats)]
    return [min(times) for times in zip(*rounds, strict=True)]


def write_configs(folder: Path) -> list[str]:
    """Write many different configurations and return their paths."""
    paths = []
    for number in range(CONFIGS):
        path = folder / f"run{number}.yaml"
        text = CONFIG.format(layers=16 + number % 64, offloaded=number % 24, pp=1 + number % 3)
        path.write_text(text, encoding="utf-8")
        paths.append(str(path))
    return paths


def write_mixed(folder: Path) -> None:
    """Write a repository's files: Python, shell, JSON, YAML of other tools, and one configuration in fifty files."""
    python = sorted((ROOT / "skill_tools").rglob("*.py"))
    for number in range(MIXED_FILES):
        name, text = MIXED[number % len(MIXED)]
        if name == "module.py":
            text = python[number % len(python)].read_text(encoding="utf-8")
        if number % 50 == 0:
            name, text = "run.yaml", CONFIG.format(layers=32, offloaded=number % 24, pp=1)
        (folder / f"{number}_{name}").write_text(text, encoding="utf-8")


def main() -> int:
    """Measure, print one line a figure, and return 1 when a limit is missed."""
    offload = [sys.executable, str(ROOT / "skill_tools")]
    lint = [*offload, "lint"]
    plans = [[*offload, "plan", "--gpu", "h100", "--gpu-memory", "60GiB", *words] for words in PLANS.values()]
    with tempfile.TemporaryDirectory() as name:
        paths = write_configs(Path(name))
        bare = [sys.executable, "-c", "pass"]
        bare_yaml = [sys.executable, "-c", "import yaml"]
        commands = [bare, bare_yaml, [*lint, paths[0]], [*offload, "--help"], *plans]
        bare_s, yaml_s, one_s, help_s, *plans_s = fastest_s(commands, REPEATS)
        (many_s,) = fastest_s([[*lint, *paths]], 3)
        mixed = Path(name) / "mixed"
        mixed.mkdir()
        write_mixed(mixed)
        (mixed_s,) = fastest_s([[*lint, str(mixed)]], 3)
    configs_per_s = CONFIGS / many_s
    times_yaml = one_s / yaml_s
    print(
        f"lint of one YAML: {one_s * 1e3:.0f} ms, {times_yaml:.2f} x `import yaml` (limit {MOST_TIMES_YAML_IMPORT})"
    )
    print(
        f"{CONFIGS} configurations in one call: {configs_per_s:.0f}/s (at least {FEWEST_CONFIGS_PER_S:.0f})"
    )
    print(f"{MIXED_FILES} mixed files in a folder: {mixed_s:.1f} s (limit {MOST_S_FOR_MIXED_FILES:.0f})")
    print(f"--help: {help_s * 1e3:.0f} ms, {help_s / bare_s:.2f} x a bare interpreter")
    limit = MOST_TIMES_YAML_IMPORT_OF_A_PLAN
    for what, plan_s in zip(PLANS, plans_s, strict=True):
        print(
            f"plan for {what}: {plan_s * 1e3:.0f} ms, {plan_s / yaml_s:.2f} x `import yaml` (limit {limit})"
        )
    return int(
        times_yaml > MOST_TIMES_YAML_IMPORT
        or configs_per_s < FEWEST_CONFIGS_PER_S
        or mixed_s > MOST_S_FOR_MIXED_FILES
        or max(plans_s) > limit * yaml_s
    )


if __name__ == "__main__":
    sys.exit(main())
