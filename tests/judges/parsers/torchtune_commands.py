# SPDX-License-Identifier: Apache-2.0
"""Files and overrides of `tune run`, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.torchtune.compose import compose

FLAGS = [
    "enable_activation_checkpointing", "enable_activation_offloading", "activation_offloading_use_streams",
    "fsdp_cpu_offload", "optimizer_in_bwd", "optimizer.fused",
]  # fmt: skip
NUMBERS = [
    "batch_size",
    "gradient_accumulation_steps",
    "clip_grad_norm",
    "optimizer.lr",
    "tensor_parallel_dim",
]
TEXTS = ["dtype", "device", "optimizer._component_", "model._component_"]
NAMES = [*FLAGS, *NUMBERS, *TEXTS]
SECTIONS = ["optimizer", "model"]
_HEAD = "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n"
_OPTIMIZER = "optimizer:\n  _component_: torch.optim.AdamW\n  fused: true\n  lr: 2e-5\n"
WORDS = [
    "true", "True", "false", "False", "yes", "no", "on", "off", "null", "None", "~", "", "1", "0", "2", "010", "0x10",
    "1e-5", "1e3", "1.0e-5", "2.5", "1_000", "bf16", "cuda", "'true'", '"4"', "[1,2]", "{a: 1}", "a: b", "10:20", "a b",
    "torch.optim.SGD", "- 1", "!x 1", "a=b", "#x", "true # on", "inf", "nan", "@", "&a b", "*a", "[1",
]  # fmt: skip
HELD = [each for each in WORDS if each not in ("- 1", "a: b", "@", "*a", "[1", "!x 1", "&a b", "a=b")]
TABLE: list[dict[str, Any]] = [
    {"text": f"{_HEAD}{_OPTIMIZER}{line}\n", "words": words}
    for line, words in (
        ("dtype: bf16", []), ("dtype: bf16\ndtype: fp32", []), ("fsdp_cpu_offload: on", []),
        ("fsdp_cpu_offload: true", ["fsdp_cpu_offload=False"]), ("fsdp_cpu_offload: true", ["~fsdp_cpu_offload"]),
        ("fsdp_cpu_offload: true", ["fsdp_cpu_offload=None"]), ("dtype: bf16", ["optimizer=torch.optim.SGD"]),
        ("dtype: bf16", ["optimizer.fused=false"]), ("dtype: bf16", ["~optimizer"]),
        ("dtype: bf16", ["~optimizer.fused"]),
        ("dtype: bf16", ["~nothing"]), ("dtype: bf16", ["fsdp_cpu_offload"]),
        ("dtype: bf16", ["--fsdp_cpu_offload=true"]),
        ("dtype: bf16", ["fsdp_cpu_offload=true", "fsdp_cpu_offload=false"]), ("dtype: bf16", ["dtype.a=1"]),
        ("dtype: bf16", ["optimizer.lr=1e-5"]), ("dtype: bf16", ["batch_size=a: b"]),
        ("<<: {dtype: fp32}", []), ("batch_size: 010", ["batch_size=010"]), ("dtype: bf16", ["optimizer={a: 1}"]),
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a file and overrides of it."""
    lines = []
    for name in random.sample(NAMES, random.randint(1, 6)):
        if "." not in name:
            value = random.choice(HELD if random.random() < 0.4 else ["true", "false", "1", "4", "bf16"])
            lines.append(f"{name}: {value}\n")
    if random.random() < 0.02 and lines:
        lines.append(lines[0])
    words = [_word(random) for _ in range(random.choice([0, 1, 1, 2, 3]))]
    return {"text": _HEAD + _OPTIMIZER + "".join(lines), "words": words}


def _word(random: Random) -> str:
    name = random.choice(NAMES if random.random() < 0.9 else SECTIONS)
    kind = random.random()
    if kind < 0.12:
        return f"~{name}" if kind < 0.1 else f"~{name}=1"
    if kind < 0.16:
        return random.choice([name, f"--{name}=1"])
    return f"{name}={random.choice(WORDS)}"


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the names that are set."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(asked["text"], encoding="utf-8")
        words = shlex.join(asked["words"])
        script = f"# torchtune=={release}\ntune run full_finetune_single_device --config run.yaml {words}\n"
        config = compose([Source("run.sh", script, Path(folder))], [])
    names = {name: name for name in NAMES} | {f"torchtune.{name}": name for name in NAMES}
    return {names[name]: value for name, value in believed_of(config, list(names)).items()}


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or hold the same values; a section in place of a value is none of the names."""
    return same_values(_without_sections(real), _without_sections(mine))


def _without_sections(answer: dict[str, Any]) -> dict[str, Any]:
    if "raised" in answer:
        return answer
    pairs = answer["value"]["map"]
    return {
        "value": {"map": [pair for pair in pairs if not (isinstance(pair[1], dict) and "map" in pair[1])]}
    }
