# SPDX-License-Identifier: Apache-2.0
"""Our verdict against LLaMA-Factory's own parser, for generated configurations and every release that is there.

    python tests/judges/llama_factory/llama_factory_judge.py --configurations 5000

The parser raises its first error alone, so a raised text must be among our findings, and our errors must be raised at
all. Arguments passed on to the Trainer are judged with it, by the shared rules of Transformers. With `--mutants`, each
of its own rules is taken away in turn, and the answers have to show it.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, Self

import yaml

from skill_tools.dialects.read import read_text
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.rules.lint import lint

sys.path.insert(0, str(Path(__file__).parents[1] / "transformers"))

from trainer_configurations import ARGUMENTS, FSDP_CONFIG, GONE, WORDS
from trainer_texts import says

FOLDER = Path(__file__).parents[3] / "build" / "judges" / "llama_factory"
WITNESS = Path(__file__).with_name("llama_factory_witness.py")
# Of these a file alone does not say whether they hold: how the training is launched does.
LAUNCHED = {"lf-ds-launch", "hf-fsdp-not-distributed"}
RAISING = [
    rule
    for rule in load_rules()
    if rule.effect == "raises" and rule.check != "log" and rule.id not in LAUNCHED
]
OWN = [rule for rule in RAISING if rule.id.startswith("lf-")]
JUDGED = [*OWN, *(rule for rule in RAISING if rule.id.startswith("hf-"))]
# The packages that each release runs with. The rules know Transformers from 4.56 on, so that older ones get none of its
# arguments.
TRANSFORMERS = {"0.9.0": ("4.51.3",), "0.9.3": ("4.51.3",), "0.9.5": ("4.57.3", "5.5.0")}
KNOWN = ("4.57.3", "5.5.0")
# Said of a removed argument as of an unknown one.
REFUSED = "not used by the HfArgumentParser"
# Said of methods that exclude each other; none of them offloads.
ELSEWHERE = re.compile(
    r"Cannot use (LoRA with )?GaLore|is only valid for LoRA|Radio-based BAdam|PiSSA for a quantized"
)
# Not all releases have these, and a release refuses unknown ones.
NEW = {"use_apollo": "0.9.2", "use_muon": "0.9.3", "use_kt": "0.9.4"}
BASE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "stage": "sft",
    "do_train": True,
    "dataset": "identity",
    "eval_dataset": "identity",
    "template": "qwen",
    "output_dir": "/nowhere",
    "report_to": "none",
}
STAGES: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    None,
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4, "gradient_clipping": "auto"},
    {"train_micro_batch_size_per_gpu": "auto"},
)
SWITCHES = (
    "pure_bf16", "use_unsloth", "use_kt", "use_galore", "use_apollo", "use_badam", "predict_with_generate",
    "pissa_init", "use_unsloth_gc", "disable_gradient_checkpointing",
)  # fmt: skip
UNKNOWN = ("cpu_offload", "offload_params", "activation_offloading", "fsdp_offload_params")
# Its own switch of checkpointing is another argument, and a mapping for it no argument of a command.
TRAINER = {
    name: values for name, values in ARGUMENTS.items() if not name.startswith("gradient_checkpointing_")
}
# Where the old name of eval_strategy is given, the new one is left open, and the parser takes its default.
NO_LONGER = {name: values for name, values in GONE.items() if name != "evaluation_strategy"}


class Asked(NamedTuple):
    """A configuration, and whether it is launched with several processes."""

    config: dict[str, Any]
    distributed: bool


def drawn(seed: int, *, with_trainer: bool) -> Asked:
    """Return the configuration of a seed, perhaps with arguments of the Trainer.

    Whoever names a DeepSpeed section launches it as it asks for.
    """
    random = Random(seed)
    config = {**BASE, "finetuning_type": random.choice(("full", "full", "lora"))}
    section = random.choice(STAGES)
    if section is not None:
        config["deepspeed"] = section
    for name in SWITCHES:
        if random.random() < 0.15:
            config[name] = random.random() < 0.85
    if random.random() < 0.1:
        config["badam_mode"] = random.choice(("layer", "ratio"))
    if random.random() < 0.08:
        config[random.choice(UNKNOWN)] = True
    if random.random() < 0.05:
        config["quantization_bit"] = random.choice((4, 8))
    if random.random() < 0.3:
        config["bf16"] = True
    if not with_trainer:
        return Asked(config, section is not None)
    if random.random() < 0.5:
        config |= sampled(random, TRAINER, 6)
    if random.random() < 0.1:
        config |= sampled(random, NO_LONGER, 1)
    if random.random() < 0.2 and "use_badam" not in config:
        config["fsdp"] = random.choice((True, True, False, *map(" ".join, WORDS)))
        config["fsdp_config"] = sampled(random, FSDP_CONFIG, 4)
    return Asked(config, section is not None or bool(config.get("fsdp")))


def sampled(random: Random, options: dict[str, list[Any]], most: int) -> dict[str, Any]:
    """Return up to `most` of `options`, each with one of its values."""
    names = random.sample(sorted(options), random.randint(0, most))
    return {name: random.choice(options[name]) for name in names}


def installed() -> list[str]:
    """Return the releases that are there, oldest first."""
    found = [path.parent.name for path in FOLDER.glob("[0-9]*/llamafactory")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


class Release:
    """One release's parser over a Transformers, running; a context manager, so that the process ends with the judge."""

    def __init__(self, version: str, transformers: str) -> None:
        below = FOLDER / f"transformers-{transformers}"
        command = [sys.executable, str(WITNESS), str(FOLDER / version), str(below)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, asked: Asked) -> str | None:
        """Return the parser's error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked._asdict()) + "\n")
        self._process.stdin.flush()
        raised: str | None = json.loads(self._process.stdout.readline())["raised"]
        return raised


def is_known(asked: Asked, version: str) -> bool:
    """Whether the release has every argument that it is given."""

    def as_numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".")]

    return all(as_numbers(NEW[name]) <= as_numbers(version) for name in asked.config if name in NEW)


class Heard(NamedTuple):
    """A configuration with the parser's error, and the rules that it breaks."""

    asked: Asked
    raised: str | None
    found: set[str]


def verdict(asked: Asked, version: str, transformers: str) -> set[str]:
    """Return the rules that the configuration breaks."""
    config = read_text(yaml.dump(asked.config, Dumper=yaml.CSafeDumper, sort_keys=False), "config.yaml")
    result = lint(config, rules=JUDGED, versions={"llamafactory": version, "transformers": transformers})
    return {finding.rule for finding in result.findings}


def disagreements(heard: Heard, rules: Sequence[Rule]) -> Iterator[str]:
    """Yield where the parser and our verdict differ, as it would be with `rules` alone."""
    raised, found = heard.raised, heard.found & {rule.id for rule in rules}
    if raised is None:
        yield from (f"found, not raised: {rule}" for rule in sorted(found))
        return
    telling = {
        rule.id
        for rule in rules
        if says(rule, raised) or (REFUSED in raised and "-arguments-gone-" in rule.id)
    }
    if not telling and not ELSEWHERE.search(raised):
        yield f"raised, no rule has the text: {raised}"
    elif telling and not telling & found:
        yield f"raised, not found: {sorted(telling)}"


def answers(version: str, transformers: str, configurations: int) -> list[Heard]:
    """Return the answers of a release to so many configurations whose arguments it knows, and ours."""
    every = (drawn(seed, with_trainer=transformers in KNOWN) for seed in count())
    known = islice((asked for asked in every if is_known(asked, version)), configurations)
    with Release(version, transformers) as release:
        return [Heard(asked, release.ask(asked), verdict(asked, version, transformers)) for asked in known]


def judged(heard: Sequence[Heard], rules: Sequence[Rule]) -> list[str]:
    """Return every disagreement, each with the configuration that shows it."""
    return [f"{one}: {each.asked}; {each.raised}" for each in heard for one in disagreements(each, rules)]


def main() -> int:
    """Judge every release; return 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=5000)
    parser.add_argument("--mutants", action="store_true", help="take each judged rule away in turn")
    stated = parser.parse_args()
    failed = False
    heard_of = {}
    for version, transformers in ((each, below) for each in installed() for below in TRANSFORMERS[each]):
        heard = heard_of[version, transformers] = answers(version, transformers, stated.configurations)
        problems = judged(heard, JUDGED)
        outcomes = Counter("raised" if each.raised else "parsed" for each in heard)
        print(f"llamafactory {version} on {transformers}: {dict(outcomes)}, {len(problems)} disagreements")
        print("\n".join(problems[:5]))
        failed |= bool(problems)
    for rule in OWN if stated.mutants else ():
        others = [each for each in JUDGED if each is not rule]
        seen = [version for (version, _), heard in heard_of.items() if judged(heard, others)]
        print(f"without {rule.id}: {'seen in ' + ', '.join(seen) if seen else 'NOT SEEN'}")
        failed |= not seen
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
