"""Says which framework inputs are for, by what they contain.

Each framework counts the names that only it would use; the most wins. A tie, or nothing recognised, is an error that
offers `--framework`: a guess would lint against the wrong rules.
"""

import re
from collections import Counter
from collections.abc import Sequence

from skill_tools.configs.config import Framework
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.configs.yaml_lines import Node, parse
from skill_tools.errors import UnusableInput

_BRIDGE_SECTIONS = frozenset(
    {
        "checkpoint", "comm_overlap", "dataset", "ddp", "dist", "env_vars", "logger", "mixed_precision", "model",
        "optimizer", "peft", "profiling", "rerun_state_machine", "rng", "scheduler", "tokenizer", "train",
        "validation", "_target_",
    }
)  # fmt: skip
_MEGATRON_LM_SECTIONS = frozenset({"MODEL_ARGS", "ENV_VARS", "ARGS", "language_model", "model_parallel"})
_DEEPSPEED_SECTIONS = frozenset(
    {"zero_optimization", "zero_force_ds_cpu_optimizer", "train_micro_batch_size_per_gpu"}
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")
_DOTTED = re.compile(r"(?<![\w.-])[+~]{0,2}([a-z_]+)\.[\w.]+=")
_CERTAIN = 1000
_PLENTY = 15


def framework_of(sources: Sequence[Source], overrides: Sequence[str]) -> Framework:
    """Return the framework that `sources` and `overrides` are for.

    Raises `UnusableInput` when none, or more than one, fits.
    """
    votes: Counter[Framework] = Counter()
    for source in sources:
        votes.update(_votes(source))
    if not votes:
        votes.update(_votes_of_text("\n".join(overrides)))
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        raise _unclear(sources)
    return ranked[0][0]


def check_stated(framework: Framework, sources: Sequence[Source]) -> None:
    """Raise `UnusableInput` where `sources` hold next to nothing of the stated framework and plenty of another's.

    What is merely unclear is the user's to state.
    """
    votes: Counter[Framework] = Counter()
    for source in sources:
        votes.update(_votes(source))
    if not votes:
        return
    likely, count = votes.most_common(1)[0]
    if count >= _PLENTY and count >= _PLENTY * votes[framework]:
        raise UnusableInput(
            f"{', '.join(source.name for source in sources)} is no configuration of {framework}",
            expected=f"--framework {likely}, by what it holds",
            attempt=f"--framework {likely}, or none",
        )


def _unclear(sources: Sequence[Source]) -> UnusableInput:
    if sources and not any(source.text.strip() for source in sources):
        return UnusableInput(
            f"{sources[0].name} is empty",
            expected="a configuration of Megatron Bridge, Megatron-LM or Axolotl",
            attempt="the file that the run reads",
        )
    names = ", ".join(source.name for source in sources) or "the overrides"
    return UnusableInput(
        f"cannot tell which framework {names} is for",
        expected="a configuration of Megatron Bridge, Megatron-LM or Axolotl",
        attempt="--framework megatron-bridge, megatron-lm or axolotl",
    )


def _votes(source: Source) -> Counter[Framework]:
    match source.kind:
        case Kind.PYTHON:
            return Counter({Framework.BRIDGE: 1})
        case Kind.SHELL:
            return _votes_of_text(source.text)
    documents = parse(source.text, source.name)
    return _votes_of_tree(documents[0]) if documents else Counter()


def _votes_of_tree(root: Node) -> Counter[Framework]:
    entries = root.value if isinstance(root.value, dict) else {}
    names = entries.keys()
    if names & _MEGATRON_LM_SECTIONS or any(name.startswith("--") for name in names):
        return Counter({Framework.MEGATRON_LM: _CERTAIN})
    if names & _DEEPSPEED_SECTIONS:
        return Counter({Framework.AXOLOTL: 1})
    flags = load_vocabulary(Framework.MEGATRON_LM).names
    axolotl = load_vocabulary(Framework.AXOLOTL).names
    sections = sum(name in _BRIDGE_SECTIONS and _is_section(name, node) for name, node in entries.items())
    return +Counter(
        {
            Framework.BRIDGE: 3 * sections,
            Framework.MEGATRON_LM: sum(f"--{name.replace('_', '-')}" in flags for name in names),
            Framework.AXOLOTL: sum(name in axolotl for name in names) + _CERTAIN * ("base_model" in names),
        }
    )


def _is_section(name: str, node: Node) -> bool:
    return isinstance(node.value, dict) or name in ("_target_", "mixed_precision")


def _votes_of_text(text: str) -> Counter[Framework]:
    """Count the flags and dotted overrides in a script; one whose flags are mostly foreign is not Megatron-LM's."""
    flags = set(_FLAG.findall(text))
    megatron, axolotl = (load_vocabulary(name).names for name in (Framework.MEGATRON_LM, Framework.AXOLOTL))
    dotted = set(_DOTTED.findall(text)) & _BRIDGE_SECTIONS
    return +Counter(
        {
            Framework.BRIDGE: 20 * len(dotted),
            Framework.MEGATRON_LM: len(flags & megatron) if 2 * len(flags & megatron) >= len(flags) else 0,
            Framework.AXOLOTL: sum(flag[2:].replace("-", "_") in axolotl for flag in flags - megatron)
            + _CERTAIN * bool(re.search(r"\baxolotl (?:train|preprocess)\b|axolotl\.cli", text)),
        }
    )
