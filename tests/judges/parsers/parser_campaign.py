# SPDX-License-Identifier: Apache-2.0
"""Holds our readers to the frameworks' own parsers, on generated inputs, release by release.

    python tests/judges/parsers/parser_campaign.py [--inputs 5000] [--seed 1] [--record] [PARSER ..]

Prints one line a parser and release, and some differences. Exit code 1 for any difference. `--record` writes the
parsers' answers to the table of first cases and to a seed of inputs into recorded.json, to which ordinary tests hold
our readers. Called by `make test-parsers`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(HERE))

import axolotl_commands  # noqa: E402
import bridge_commands  # noqa: E402
import deepspeed_files  # noqa: E402
import hf_arguments  # noqa: E402
import hf_commands  # noqa: E402
import hydra_overrides  # noqa: E402
import lightning_scripts  # noqa: E402
import llama_factory_commands  # noqa: E402
import megatron_lm_commands  # noqa: E402
import ms_swift_commands  # noqa: E402
import nemo_rl_commands  # noqa: E402
import prime_rl_files  # noqa: E402
import torchtitan_commands  # noqa: E402
import torchtitan_options  # noqa: E402
import torchtune_commands  # noqa: E402
import trl_commands  # noqa: E402
import verl_commands  # noqa: E402
import yaml_texts  # noqa: E402
from parser_answers import Answer, agree, encoded  # noqa: E402

from skill_tools.errors import UnusableInput  # noqa: E402

FOLDER = ROOT / "build" / "parsers"
RECORDED = HERE / "recorded.json"
WIDTH = 300
SEED_OF_RECORD, RECORDED_INPUTS = 52, 40


class Parser(NamedTuple):
    """One parser: who answers for it, its questions, and our reader; `releases` maps each to its folders.

    `installed` is the package that `python` needs in the asked release, if no folder holds it.
    """

    witness: str
    releases: dict[str, tuple[str, ...]]
    question: Callable[[Random], dict[str, Any]]
    table: list[dict[str, Any]]
    ours: Callable[[dict[str, Any], str], Any]
    agrees: Callable[[Answer, Answer], bool] = agree
    python: str = sys.executable
    installed: str = ""


_OMEGACONF = ("PyYAML-6.0.3", "antlr4-python3-runtime-4.9.3")
_TRAINERS = str(ROOT / ".venv-trainers" / "bin" / "python")
_LLAMA_FACTORY = "../judges/llama_factory/"
_TYRO = ("tyro-1.0.17", "typeguard-4.6.1", "docstring_parser-0.18.0")
_AXOLOTL = ("click-8.1.8", "fire-0.7.1", "termcolor-3.1.0", "addict-2.4.0")
PARSERS = {
    "yaml": Parser(
        "yaml_safe",
        {each: (f"PyYAML-{each}",) for each in ("6.0.2", "6.0.3", "6.0.4")},
        yaml_texts.question,
        [{"text": text} for text in yaml_texts.TABLE],
        yaml_texts.ours_safe,
    ),
    "omegaconf": Parser(
        "omegaconf",
        {each: (f"omegaconf-{each}", *_OMEGACONF) for each in ("2.3.0", "2.3.1", "2.4.0")},
        yaml_texts.omegaconf_question,
        [{"text": text} for text in yaml_texts.TABLE],
        yaml_texts.ours_omegaconf,
    ),
    "json": Parser(
        "json_loads",
        {"python": ()},
        yaml_texts.json_question,
        [{"text": text} for text in yaml_texts.JSON_TABLE],
        yaml_texts.ours_json,
    ),
    "hydra": Parser(
        "hydra",
        {
            each: (f"hydra-core-{each}", "omegaconf-2.3.0", "packaging-25.0", *_OMEGACONF)
            for each in ("1.3.2", "1.3.8")
        },
        hydra_overrides.question,
        hydra_overrides.TABLE,
        hydra_overrides.ours,
    ),
    "trl": Parser(
        "trl",
        {"1.16.0": ()},
        trl_commands.question,
        trl_commands.TABLE,
        trl_commands.ours,
        trl_commands.agree,
        _TRAINERS,
        "trl",
    ),
    "hf": Parser(
        "hf",
        {"5.23.0": ()},
        hf_commands.question,
        hf_commands.TABLE,
        hf_commands.ours,
        hf_arguments.agree,
        _TRAINERS,
        "transformers",
    ),
    "lightning": Parser(
        "lightning",
        {"2.6.6": ()},
        lightning_scripts.question,
        lightning_scripts.TABLE,
        lightning_scripts.ours,
        lightning_scripts.agree,
        _TRAINERS,
        "lightning",
    ),
    "llama-factory": Parser(
        "llama_factory",
        {
            release: (f"{_LLAMA_FACTORY}{release}", f"{_LLAMA_FACTORY}transformers-{transformers}")
            for release, transformers in (("0.9.0", "4.51.3"), ("0.9.3", "4.51.3"), ("0.9.5", "5.5.0"))
        },
        llama_factory_commands.question,
        llama_factory_commands.TABLE,
        llama_factory_commands.ours,
        hf_arguments.agree,
    ),
    "deepspeed": Parser(
        "deepspeed",
        {each: (f"../../.deepspeed/{each}", "../../.deepspeed/extras") for each in ("0.17.6", "0.19.8")},
        deepspeed_files.question,
        deepspeed_files.TABLE,
        deepspeed_files.ours,
        deepspeed_files.agree,
    ),
    "nemo-rl": Parser(
        "nemo_rl",
        {
            each: (f"../nemo_rl/{each}", "hydra-core-1.3.2", "omegaconf-2.3.0", "packaging-25.0", *_OMEGACONF)
            for each in ("0.5.0", "0.6.0", "0.7.0")
        },
        nemo_rl_commands.question,
        nemo_rl_commands.TABLE,
        nemo_rl_commands.ours,
        nemo_rl_commands.agree,
    ),
    "megatron-lm": Parser(
        "megatron_lm",
        {each: (f"../megatron_lm/{each}", "../../.megatron-core/extras") for each in ("0.16.1", "0.19.0")},
        megatron_lm_commands.question,
        megatron_lm_commands.TABLE,
        megatron_lm_commands.ours,
        megatron_lm_commands.agree,
    ),
    "megatron-bridge": Parser(
        "megatron_bridge",
        {
            each: (
                f"megatron-bridge-{each}",
                "../../.megatron-core/0.19.2",
                "../../.megatron-core/extras",
                "hydra-core-1.3.2",
                "omegaconf-2.3.0",
                "packaging-25.0",
                *_OMEGACONF,
            )
            for each in ("0.6.2",)
        },
        bridge_commands.question,
        bridge_commands.TABLE,
        bridge_commands.ours,
        bridge_commands.agree,
        _TRAINERS,
    ),
    "prime-rl": Parser(
        "prime_rl",
        {
            release: (f"../prime_rl/{folder}/packages/prime-rl-configs/src", "../rl/libraries")
            for release, folder in (("0.6.0", "0.6.0"), ("0.8.0", "0.8.0"), ("0.8.1.dev0", "main"))
        },
        prime_rl_files.question,
        prime_rl_files.TABLE,
        prime_rl_files.ours,
        prime_rl_files.agree,
    ),
    "torchtitan": Parser(
        "torchtitan",
        {each: (f"torchtitan-{each}", *_TYRO) for each in ("0.2.0", "0.2.2")},
        torchtitan_commands.question,
        torchtitan_commands.TABLE,
        torchtitan_commands.ours,
        torchtitan_commands.agree,
        _TRAINERS,
    ),
    "torchtitan-options": Parser(
        "torchtitan_options",
        {each: (f"torchtitan-{each}", *_TYRO) for each in ("0.3.0",)},
        torchtitan_options.question,
        torchtitan_options.TABLE,
        torchtitan_options.ours,
        torchtitan_options.agree,
        _TRAINERS,
    ),
    "ms-swift": Parser(
        "ms_swift",
        {each: (f"../ms_swift/{each}",) for each in ("4.3.2", "4.6.0")},
        ms_swift_commands.question,
        ms_swift_commands.TABLE,
        ms_swift_commands.ours,
        ms_swift_commands.agree,
        _TRAINERS,
    ),
    "torchtune": Parser(
        "torchtune",
        {each: (f"torchtune-{each}", "omegaconf-2.3.0", *_OMEGACONF) for each in ("0.5.0", "0.6.1")},
        torchtune_commands.question,
        torchtune_commands.TABLE,
        torchtune_commands.ours,
        torchtune_commands.agree,
    ),
    "verl": Parser(
        "verl",
        {each: (f"../verl/{each}", "../rl/libraries") for each in ("0.6.1", "0.7.1", "0.8.0", "0.9.1")},
        verl_commands.question,
        verl_commands.TABLE,
        verl_commands.ours,
        verl_commands.agree,
        _TRAINERS,
    ),
    "axolotl": Parser(
        "axolotl",
        {each: (f"axolotl-{each}", *_AXOLOTL) for each in ("0.18.0", "0.21.0")},
        axolotl_commands.question,
        axolotl_commands.TABLE,
        axolotl_commands.ours,
        axolotl_commands.agree,
    ),
}


def missing(parser: Parser, release: str) -> str:
    """Return why a release of the parser cannot be asked here; nothing where it can."""
    if not all((FOLDER / each).is_dir() for each in parser.releases[release]):
        return "make test-parsers has not fetched it"
    if not Path(parser.python).is_file():
        return f"{parser.python} is not there"
    if not parser.installed:
        return ""
    ask = f"import importlib.metadata as m; print(m.version({parser.installed!r}))"
    done = subprocess.run([parser.python, "-c", ask], capture_output=True, text=True, check=False)
    return "" if done.stdout.strip() == release else f"{parser.python} lacks {parser.installed} {release}"


def answered(parser: Parser, question: dict[str, Any], release: str) -> Answer:
    """Return our reader's answer."""
    try:
        return {"value": encoded(parser.ours(question, release))}
    except (UnusableInput, ValueError) as error:
        return {"raised": str(error)[:300]}


def asked(parser: Parser, release: str, questions: list[dict[str, Any]]) -> list[Answer]:
    """Return the answer of the framework's own parser."""
    folders = [str(FOLDER / each) for each in parser.releases[release]]
    lines = "".join(f"{json.dumps(each)}\n" for each in questions)
    command = [parser.python, str(HERE / "parser_witness.py"), parser.witness, *folders]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{parser.witness} {release}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def questions_of(parser: Parser, seed: int, inputs: int) -> list[dict[str, Any]]:
    """Return the table and as many generated inputs."""
    random = Random(seed)
    return [*parser.table, *(parser.question(random) for _ in range(inputs))]


def differences(name: str, release: str, questions: list[dict[str, Any]], shown: int) -> int:
    """Print how many answers differ, and some of them."""
    parser = PARSERS[name]
    real = asked(parser, release, questions)
    found = []
    for question, answer in zip(questions, real, strict=True):
        mine = answered(parser, question, release)
        if not parser.agrees(answer, mine):
            found.append((question, answer, mine))
    taken = sum("value" in answer for answer in real)
    print(
        f"{name} {release}: {len(questions)} inputs, {taken} accepted by the parser, {len(found)} differences"
    )
    for question, answer, mine in found[:shown]:
        for what, said in (("", question), ("  real ", answer), ("  ours ", mine)):
            print(f"  {what}{json.dumps(said)[:WIDTH]}")
    return len(found)


def record(names: list[str]) -> None:
    """Write the real answers that the ordinary tests compare with."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    for name in names:
        parser = PARSERS[name]
        questions = questions_of(parser, SEED_OF_RECORD, RECORDED_INPUTS)
        kept[name] = {
            release: [
                [question, answer]
                for question, answer in zip(questions, asked(parser, release, questions), strict=True)
            ]
            for release in parser.releases
        }
    RECORDED.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Run the campaigns."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "parsers", nargs="*", metavar="PARSER", help=f"of {', '.join(PARSERS)}; default: all"
    )
    arguments.add_argument("--inputs", type=int, default=5000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--shown", type=int, default=6, help="differences to print for each release")
    arguments.add_argument("--record", action="store_true")
    args = arguments.parse_args()
    names = args.parsers or list(PARSERS)
    if args.record:
        record(names)
        return 0
    found = 0
    for name in names:
        questions = questions_of(PARSERS[name], args.seed, args.inputs)
        found += sum(differences(name, release, questions, args.shown) for release in PARSERS[name].releases)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
