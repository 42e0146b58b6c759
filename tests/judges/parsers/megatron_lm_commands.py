# SPDX-License-Identifier: Apache-2.0
"""Commands of Megatron-LM's programs, and our reader's values of them."""

import shlex
from random import Random
from typing import Any

from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.megatron.lm_compose import compose
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.lint import lint

SWITCHES = [
    "--fine-grained-activation-offloading", "--optimizer-cpu-offload", "--use-torch-optimizer-for-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer", "--use-distributed-optimizer", "--bf16",
    "--overlap-grad-reduce", "--sequence-parallel", "--no-pin-cpu-grads", "--no-pin-cpu-params",
]  # fmt: skip
WHOLE = [
    "--cpu-offloading-num-layers", "--recompute-num-layers", "--min-offloaded-tensor-size", "--num-layers",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size",
]  # fmt: skip
CHOSEN = {
    "--recompute-granularity": ["full", "selective"],
    "--recompute-method": ["uniform", "block"],
    "--main-grads-dtype": ["fp32", "bf16"],
    "--exp-avg-dtype": ["fp32", "fp16", "bf16", "fp8"],
    "--optimizer": ["adam", "sgd"],
}
LISTS = ["--offload-modules", "--recompute-modules"]
FRACTION = "--optimizer-offload-fraction"
NAMES = [*SWITCHES, *WHOLE, *CHOSEN, *LISTS, FRACTION]
_WHOLE = [
    "1",
    "2",
    "4",
    "8",
    "0",
    "-1",
    "2.0",
    "1_0",
    "0x2",
    "010",
    " 3",
    "",
    "auto",
    "true",
    "1e3",
    "+2",
    "None",
]
_NUMBERS = ["0.5", "1.0", "1", "0", "1e-1", "-0.5", "inf", "nan", ".5", "1_0.0", "half", "", "True"]
_MODULES = ["core_attn", "moe_act", "qkv_linear", "attn_proj", "mlp_norm", "core-attn", ""]
_PROVEN = ["--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128"]
TABLE = [
    {"words": words.split()}
    for words in (
        "--optimizer-cpu-offload", "--optimizer-cpu-offload true", "--optimizer-cpu-offload=true",
        "--optimizer_cpu_offload", "--optimizer-cpu-off", "--no-optimizer-cpu-offload", "--cpu-offloading",
        "--cpu-offloading-num-layers 1_0", "--cpu-offloading-num-layers 2.0", "--cpu-offloading-num-layers",
        "--cpu-offloading-num-layers 2 --cpu-offloading-num-layers 0", "--offload-modules core_attn moe_act",
        "--offload-modules", "--offload-modules=core_attn moe_act", "--optimizer-offload-fraction 1e-1",
        "--cpu-offloading-num-layers auto --cpu-offloading-num-layers 1", "--bf16 bf16", "--no-pin-cpu-grads true",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return the options of a command."""
    return {"words": [word for _ in range(random.choice([1, 1, 2, 3, 4])) for word in _option(random)]}


def _option(random: Random) -> list[str]:
    name, kind = random.choice(NAMES), random.random()
    written = name
    if kind < 0.03:
        written = random.choice(
            [name.replace("-", "_").replace("__", "--", 1), name[:-2], name.replace("--", "--no-")]
        )
    if name in SWITCHES:
        if kind > 0.97:
            return [f"{written}={random.choice(['true', 'false', ''])}"]
        return [written, random.choice(["true", "False", "1"])] if kind > 0.94 else [written]
    if kind > 0.97:
        return [written]
    if name in LISTS:
        values = random.choices(_MODULES, k=random.choice([1, 2, 3]))
        return [f"{written}={values[0]}", *values[1:]] if kind > 0.9 else [written, *values]
    # A fork's parser says which other optimizers there are.
    chosen = [*CHOSEN.get(name, []), *([] if name == "--optimizer" else ["none", "FULL", "True"])]
    fitting = _WHOLE if name in WHOLE else _NUMBERS if name == FRACTION else chosen
    value = random.choice(fitting if random.random() < 0.6 else fitting[:2])
    return [f"{written}={value}"] if kind > 0.85 else [written, value]


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the given options, or raise for words that argparse refuses."""
    words = shlex.join([*_PROVEN, *asked["words"]])
    config = compose([Source("run.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n", None)], [])
    found = {each.rule for each in lint(config, versions={"megatron-core": release}).findings}
    if config.wrong_types or found & _PARSED:
        raise ValueError(str([*found, *config.wrong_types])[:200])
    return believed_of(config, NAMES)


# The rules about argparse's refusals; the others are about the use of the values.
_PARSED = {
    rule.id
    for rule in load_rules()
    if rule.effect == "raises" and any("unrecognized arguments" in text for text in rule.raises)
}


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each given option has the parser's value."""
    if "value" in real and "value" in mine:
        names = {name for name, _ in mine["value"]["map"]}
        real = {"value": {"map": [each for each in real["value"]["map"] if each[0] in names]}}
    return same_values(real, mine)
