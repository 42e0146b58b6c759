# SPDX-License-Identifier: Apache-2.0
"""Files and overrides of NeMo-RL, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import hydra_overrides
import yaml
from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.nemo_rl.compose import compose

MEGATRON = "policy.megatron_cfg"
FLAGS = [
    "policy.dtensor_cfg.enabled", "policy.dtensor_cfg.cpu_offload", "policy.dtensor_cfg.activation_checkpointing",
    "policy.offload_optimizer_for_logprob", f"{MEGATRON}.enabled", f"{MEGATRON}.optimizer.optimizer_cpu_offload",
    f"{MEGATRON}.optimizer.overlap_cpu_optimizer_d2h_h2d", f"{MEGATRON}.model_overrides.cpu_offloading",
]  # fmt: skip
NUMBERS = [
    f"{MEGATRON}.optimizer.optimizer_offload_fraction", f"{MEGATRON}.tensor_model_parallel_size",
    "cluster.gpus_per_node", "cluster.num_nodes",
]  # fmt: skip
NAMES = [*FLAGS, *NUMBERS]
SECTIONS = sorted({name.rpartition(".")[0] for name in NAMES})
VALUES: list[Any] = [True, False, True, False, 0, 1, 2, 0.5, "true", "no", "1e-5", None, [], {}]
GIVEN = [
    "true",
    "false",
    "True",
    "1",
    "0",
    "2",
    "0.5",
    "1e-1",
    "007",
    "null",
    "no",
    "'true'",
    "[1]",
    "{a:1}",
    "",
]
_CPU = {"policy": {"dtensor_cfg": {"enabled": True, "cpu_offload": False}}}
TABLE: list[dict[str, Any]] = [
    {"files": {"run.yaml": yaml.safe_dump(_CPU)}, "words": words.split()}
    for words in (
        "", "policy.dtensor_cfg.cpu_offload=true", "+policy.dtensor_cfg.cpu_offload=true",
        "++policy.dtensor_cfg.cpu_offload=true", "policy.dtensor_cfg.activation_checkpointing=true",
        "+policy.dtensor_cfg.activation_checkpointing=true", "~policy.dtensor_cfg.cpu_offload",
        "~policy.dtensor_cfg.activation_checkpointing", "policy.dtensor_cfg.cpu_offload=00",
        "~policy.dtensor_cfg.cpu_offload=true", "~policy.dtensor_cfg.cpu_offload=false",
        "policy.dtensor_cfg={cpu_offload:true}", "policy.dtensor_cfg=null", "--policy.dtensor_cfg.cpu_offload=true",
    )
] + [
    {"files": {"run.yaml": text, "base.yaml": yaml.safe_dump(_CPU)}, "words": []}
    for text in (
        "defaults: base.yaml\npolicy:\n  dtensor_cfg:\n    _override_: true\n    enabled: true\n",
        "defaults: base.yaml\npolicy:\n  _override_: true\n  megatron_cfg:\n    enabled: true\n",
        "defaults: base.yaml\npolicy:\n  dtensor_cfg: null\n",
        "defaults: [base.yaml]\npolicy:\n  dtensor_cfg:\n    cpu_offload: true\n    cpu_offload: true\n",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a file, at times over another, and overrides of it."""
    files = {"run.yaml": _file(random, ["base.yaml"] if random.random() < 0.3 else [])}
    if "defaults" in files["run.yaml"]:
        files["base.yaml"] = _file(random, [])
    words = [_word(random) for _ in range(random.choice([0, 1, 1, 2]))]
    return {"files": files, "words": words}


def _file(random: Random, parents: list[str]) -> str:
    tree: dict[str, Any] = {"defaults": parents[0]} if parents else {}
    for name in random.sample(NAMES, random.randint(2, 8)):
        section = tree
        for part in name.split(".")[:-1]:
            section = section.setdefault(part, {})
        section[name.rpartition(".")[2]] = random.choice(VALUES)
    if parents and random.random() < 0.3:
        section = tree.setdefault("policy", {})
        if random.random() < 0.5:
            section = section.setdefault(random.choice(["dtensor_cfg", "megatron_cfg"]), {})
        section["_override_"] = random.choice([True, True, False])
    return yaml.safe_dump(tree, sort_keys=False)


def _word(random: Random) -> str:
    sign, value = random.choice(["", "", "", "+", "++", "~"]), random.choice(GIVEN)
    if random.random() < 0.1:
        value = random.choice(hydra_overrides.VALUES)
    name = random.choice(NAMES if random.random() < 0.9 else SECTIONS)
    if "{" in value:  # a section of Megatron's own has fields that its class checks later
        name, value = random.choice(["policy.dtensor_cfg", "policy.dtensor_cfg.cpu_offload"]), "{a:1}"
    return f"{sign}{name}" if sign == "~" and random.random() < 0.5 else f"{sign}{name}={value}"


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the names that are set."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in asked["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        words = shlex.join(asked["words"])
        script = f"# nemo-rl=={release}\nuv run examples/run_grpo.py --config run.yaml {words}\n"
        config = compose([Source("run.sh", script, Path(folder))], [])
    return believed_of(config, NAMES)


agree = same_values
