# SPDX-License-Identifier: Apache-2.0
"""Frameworks whose configurations are known by sight and not read: they are refused by name, with an alternative.

Without this a file of MindSpeed-LLM is Megatron-LM's with thirty misspelt options, one of SimpleTuner is
DeepSpeed's, and one of the others is nothing.
Apart because a new entry here changes no reader.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from skill_tools.configs.source import Kind, Source
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.started import COMMAND

_PLAN = f"{COMMAND} plan --framework pytorch --model NAME --gpus N, for the training alone"


class Known(NamedTuple):
    """A framework: its name, its own words in a script or names at the top of a file, and the advice.

    A script is its own by any match of `command`, which holds one of `marks`, or by two of `options` beside the text
    `inside`. A file is its own by all of `names`, with or without leading dashes, beside that text.
    """

    label: str
    marks: tuple[str, ...]
    command: str
    options: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    attempt: str = _PLAN
    inside: str = ""


KNOWN = (
    Known("MindSpeed-LLM's FSDP2 trainer", ("train_fsdp2.py",), r"(?m)^[^#\n]*\btrain_fsdp2\.py\b"),
    Known(
        "LitGPT",
        ("litgpt",),
        r"(?m)^[^#\n]*\blitgpt (?:finetune|pretrain)",
        names=frozenset({"checkpoint_dir", "out_dir", "train"}),
    ),
    Known(
        "nanotron",
        ("run_train.py",),
        r"(?m)^[^#\n]*\brun_train\.py\b[^#\n]*--config-file",
        names=frozenset({"general", "parallelism", "tokens", "checkpoints"}),
    ),
    Known(
        "LLM Foundry",
        ("composer", "llmfoundry"),
        r"(?m)^[^#\n]*\bcomposer\b[^#\n]*\btrain\.py\b|^[^#\n]*\bllmfoundry train\b",
        names=frozenset({"train_loader", "max_duration", "max_seq_len"}),
    ),
    Known(
        "ROLL",
        ("roll_pipeline", "start_"),
        r"(?m)^[^#\n]*\bstart_(?:rlvr|agentic|dpo|distill|sft)\w*pipeline\.py",
        attempt=f"{COMMAND} lint on the YAML that it names",
    ),
    Known(
        "mcore_adapter",
        (),
        "",
        options=("--use_mca", "--tensor_model_parallel_size", "--use_distributed_optimizer"),
        inside="run_train.py",
    ),
    Known(
        "a record of ms-swift",
        (),
        "",
        names=frozenset({"swift_version", "global_world_size"}),
        attempt=f"{COMMAND} lint on the script that started the run",
    ),
    Known(
        "Oumi",
        ("oumi",),
        r"(?m)^[^#\n]*\boumi (?:distributed \w+ -m oumi )?train\b",
        attempt=f"{COMMAND} lint on the YAML that it names",
    ),
    Known(
        "NeMo AutoModel",
        ("automodel",),
        r"(?m)^[^#\n]*\bautomodel (?:(?:finetune|pretrain|kd)\b|[^\s#]+\.ya?ml\b)",
        attempt=f"{COMMAND} lint on the YAML that it names",
    ),
    Known(
        "XTuner",
        ("xtuner",),
        r"(?m)^[^#\n]*\bxtuner(?:/v1/train/cli/\w+\.py|\.v1\.train\.cli\.\w+| train )",
        attempt=f"{COMMAND} lint on the Python file behind --config",
    ),
    Known(
        "VeOmni",
        ("tasks/train_",),
        r"(?m)^[^#\n]*\btrain\.sh\s+tasks/train_\w+\.py",
        attempt=f"{COMMAND} lint on the YAML that it names",
    ),
    Known(
        "SimpleTuner",
        ("simpletuner",),
        r"(?m)^[^#\n]*\bsimpletuner train\b",
        attempt=f"{COMMAND} lint config/config.json, the file that it reads",
    ),
)


_IN_SCRIPTS = tuple({word for each in KNOWN for word in (*each.marks, *each.options)})


def require_none(sources: Sequence[Source]) -> None:
    """Raise `Unrecognised` where `sources` hold a configuration of one of them."""
    for source in sources:
        for each, proof in _proofs(source):
            raise Unrecognised(
                f"{source.name} is {each.label}'s ({proof}), which is not read",
                expected="a configuration of a framework that rules are about",
                attempt=each.attempt,
            )


def _proofs(source: Source) -> Iterator[tuple[Known, str]]:
    if source.kind is Kind.SHELL:
        text = source.script
        if not any(word in text for word in _IN_SCRIPTS):  # as in nearly all commands of a folder
            return
        for each in KNOWN:
            named = each.options if each.inside in text else ()
            options = [option for option in named if option in text and _is_given(option, text)]
            found = re.search(each.command, text) if any(mark in text for mark in each.marks) else None
            if found or len(options) > 1:
                yield each, " ".join(found[0].split())[-60:] if found else ", ".join(options[:3])
    elif source.kind in (Kind.YAML, Kind.JSON):
        wanted = [each for each in KNOWN if each.names and all(name in source.text for name in each.names)]
        for each in wanted:
            if each.inside in source.text and each.names <= {name.lstrip("-") for name in _top(source)}:
                yield each, ", ".join([*sorted(each.names), *([each.inside] if each.inside else [])])


def _is_given(option: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){option}(?![\w-])", text) is not None


def _top(source: Source) -> Mapping[str, object]:
    try:
        root = source.documents[0].value if source.documents else None
    except UnusableInput:  # whoever reads it names the fault
        return {}
    return root if isinstance(root, dict) else {}
