# SPDX-License-Identifier: Apache-2.0
"""Files and overrides of Megatron Bridge, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import hydra_overrides
import yaml
from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.megatron.bridge_compose import compose
from skill_tools.rules.lint import lint

Answer = dict[str, Any]
FLAGS = [
    "model.cpu_offloading", "model.cpu_offloading_activations", "model.cpu_offloading_weights",
    "model.cpu_offloading_double_buffering", "model.fine_grained_activation_offloading", "model.sequence_parallel",
    "optimizer.optimizer_cpu_offload", "optimizer.use_torch_optimizer_for_cpu_offload",
    "optimizer.overlap_cpu_optimizer_d2h_h2d", "optimizer.pin_cpu_grads", "optimizer.pin_cpu_params",
    "optimizer.use_precision_aware_optimizer", "ddp.overlap_grad_reduce", "ddp.use_megatron_fsdp",
    "ddp.average_in_collective",
]  # fmt: skip
NUMBERS = [
    "model.cpu_offloading_num_layers", "model.recompute_num_layers", "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size", "optimizer.optimizer_offload_fraction", "optimizer.lr",
]  # fmt: skip
TEXTS = ["model.recompute_granularity", "model.recompute_method", "optimizer.optimizer"]
LISTS = ["model.recompute_modules", "model.offload_modules"]
NAMES = [*FLAGS, *NUMBERS, *TEXTS, *LISTS]
SECTIONS = ["model", "optimizer", "ddp"]
_TRUTHS: list[Any] = [True, False, True, False, 0, 1, "true", "no", None, [], {}, 1.0]
_SIZES: list[Any] = [0, 1, 2, 8, 0.5, 1e-4, "1e-4", "1e9", -1, None, "2"]
_WORDS: list[Any] = ["full", "selective", "block", "uniform", "adam", "sgd", None, "null", 1]
_MODULES: list[Any] = [["core_attn"], ["moe_act", "mlp"], [], None, "core_attn", [1]]
_BY_NAME = (
    dict.fromkeys(FLAGS, _TRUTHS)
    | dict.fromkeys(NUMBERS, _SIZES)
    | dict.fromkeys(TEXTS, _WORDS)
    | dict.fromkeys(LISTS, _MODULES)
)
_GIVEN = {
    "flag": ["true", "false", "True", "TRUE", "1", "0", "007", "null", "no", "'true'", "[1]", "{a:1}", "", "1.0"],
    "number": ["1", "2", "0.5", "1e-4", "1_000", "-1", "null", "'2'", "0x10", "01", ""],
    "text": ["full", "selective", "null", "'null'", "block", "1", "a b"],
    "list": ["[core_attn]", "[moe_act,mlp]", "[]", "null", "core_attn", "['a b',1]", "[[1]]"],
}  # fmt: skip
_NULL = [
    "model.cpu_offloading_weights",  # whose default the release of the core decides
    "model.recompute_modules",
    "model.recompute_num_layers",
    "optimizer.lr",
    "model.recompute_granularity",
    "model.recompute_method",
]
_CPU = {"model": {"cpu_offloading": True, "cpu_offloading_num_layers": 2}}
TABLE: list[dict[str, Any]] = [
    {"text": yaml.safe_dump(_CPU), "words": words.split()}
    for words in (
        "", "model.cpu_offloading=false", "+model.cpu_offloading=false", "++model.cpu_offloading=false",
        "~model.cpu_offloading", "~model.cpu_offloading=true", "~model.cpu_offloading=false", "~model",
        "model.cpu_ofloading=true", "+model.cpu_ofloading=true", "++model.cpu_ofloading=true", "~model.cpu_ofloading",
        "+model.recompute_granularity=full", "model={cpu_offloading:false}", "model=null", "ddp={}",
        "model.cpu_offloading=007", "model.cpu_offloading.x=1", "model.recompute_modules=[core_attn]",
        "+model.recompute_modules=[core_attn]", "nobody.x=1", "+nobody.x=1",
        "--model.cpu_offloading=true", "model.cpu_offloading", "optimizer.lr=1e-4",
    )
] + [
    {"text": text, "words": []}
    for text in (
        "model:\n  cpu_offloading: true\n  cpu_offloading: false\n", "model: null\n", "model: {}\n", "",
        "model:\n  cpu_ofloading: true\n", "model:\n  cpu_offloading: on\n", "model:\n  cpu_offloading: 'on'\n",
        "optimizer:\n  lr: 1e-4\n", "optimizer:\n  lr: 1_000\n", "model: [1]\n", "- model\n",
        "model:\n  recompute_method: ???\n",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a file, and overrides of it."""
    tree: dict[str, Any] = {}
    for name in random.sample(NAMES, random.randint(0, 6)):
        section, _, field = name.partition(".")
        field = field.replace("offload", "ofload") if random.random() < 0.02 else field
        tree.setdefault(section, {})[field] = random.choice(_BY_NAME[name])
    words = [_word(random) for _ in range(random.choice([0, 1, 1, 2, 3]))]
    words = [word for word in words if "ofload" not in word or "ofload" not in str(tree)]
    # Nobody writes a null section and a later + that fills it again.
    words.sort(key=lambda word: word.lstrip("+~") in [f"{section}=null" for section in SECTIONS])
    if random.random() < 0.03:
        tree[random.choice(SECTIONS)] = random.choice([{}, {}] if words else [None, {}])
    return {"text": yaml.safe_dump(tree, sort_keys=False), "words": words}


def _word(random: Random) -> str:
    name = random.choice(NAMES)
    kind = "flag" if name in FLAGS else "number" if name in NUMBERS else "text" if name in TEXTS else "list"
    # The recipe's value where the class has null is not known here, nor whether a ~ finds something.
    sign = random.choice(["", "", "", "", "+", "++", "" if name in _NULL else "~"])
    value = random.choice(_GIVEN[kind])
    if random.random() < 0.1:
        value = random.choice(hydra_overrides.VALUES)
    if random.random() < 0.03:
        name, value = random.choice(SECTIONS), random.choice(["{cpu_offloading:true}", "{}", "null", "{a:1}"])
    if random.random() < 0.03:
        name = name.replace("offload", "ofload")
    return f"{sign}{name}" if sign == "~" and random.random() < 0.5 else f"{sign}{name}={value}"


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the set names, or raise the rules' refusals."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(asked["text"], encoding="utf-8")
        words = shlex.join(asked["words"])
        script = f"torchrun scripts/training/run_recipe.py --recipe a_recipe --config-file run.yaml {words}\n"
        config = compose([Source("run.sh", script, Path(folder))], [])
    found = lint(config, versions={"megatron-bridge": release}).findings
    refused = [each.rule for each in found if each.rule in _RAISING]
    if refused:
        raise ValueError(str(refused))
    return believed_of(config._replace(unknown=(), faults=()), NAMES)


_RAISING = {"br-dotted-unknown-key", "br-override-refused"}


def agree(real: Answer, mine: Answer) -> bool:
    """Return whether both refuse, or each name has the value that is set, and otherwise the recipe's own."""
    if "value" in real and "value" in mine:
        believed = {name for name, _ in mine["value"]["map"]}
        kept = [
            [name, value["map"][0][1]]
            for name, value in real["value"]["map"]
            if name in believed or value["map"][1][1]
        ]
        real = {"value": {"map": kept}}
    return same_values(real, mine)
