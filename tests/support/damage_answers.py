# SPDX-License-Identifier: Apache-2.0
"""Damages the inputs of `plan`, `diagnose` and `explain`: exit code 0, 1 or 2 within 2 s, and it is only read.

    python tests/support/damage_answers.py --inputs 17000        (make test-damage: 51,000 in all)

Files, options and profiles are damaged as `damage.py` damages configurations; the commands run in this process.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from damage import SLOWEST_S, SPLICES, VALUES, Watch, damaged, examples

from skill_tools import knowledge
from skill_tools.__main__ import main
from skill_tools.bundle import knowledge_path, root
from skill_tools.rules.knowledge import load_rules

FILES = root() / "evals" / "files"
AMOUNTS = ["1e308", "9" * 5000, "-1", "0", "1:1:1", "1e-9GiB", "NaN", "80 XB", "é"]
OPTIONS = {
    "--gpu-memory": (["80GiB", "40GB", "24"], AMOUNTS),
    "--host-memory": (["1TiB", "64GB"], AMOUNTS),
    "--gpus": (["1", "8", "16", "128"], ["0", "-3", "9" * 5000, "1e9", "x", "7"]),
    "--gpu": (["h100", "4090", "A100-40GB", "MI300X"], ["1,2,3,4", "9" * 5000, "\x1b[31m", "auto"]),
    "--model": (["llama-3-8b", "qwen3-30b-a3b"], ["no such", *VALUES]),
    "--step-time": (["1.5"], VALUES),
    "--framework": (["pytorch", "megatron-bridge", "axolotl", "transformers"], ["x"]),
}
SIZES = ["num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length", "micro_batch_size"]
SHAPE = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip

Words = Callable[[random.Random, Path], list[str]]


def written(folder: Path, name: str, text: str) -> str:
    """Write `text` into the folder and return its path."""
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return str(path)


def configuration(chance: random.Random, folder: Path) -> str:
    """Write a damaged configuration, of a rule's example or of real size, and return its path."""
    if chance.random() < 0.4:
        path = chance.choice(CONFIGURATIONS)
        suffix, text = path.suffix, path.read_text(encoding="utf-8")
    else:
        suffix = chance.choice([suffix for suffix in EXAMPLES if suffix])
        _, text = chance.choice(EXAMPLES[suffix])
    return written(
        folder, f"x{suffix}", damaged(text, chance.randrange(2**32)) if chance.random() < 0.5 else text
    )


def one_of(chance: random.Random, usual: list[str], absurd: list[str]) -> str:
    """Return a value, now and then an absurd one: most calls shall get as far as a plan."""
    return chance.choice(absurd if chance.random() < 0.08 else usual)


def machine(chance: random.Random, folder: Path) -> list[str]:
    """Return options about the machine and the model, some of them absurd."""
    words = []
    for option, (usual, absurd) in OPTIONS.items():
        if chance.random() < (0.8 if option == "--model" else 0.3):
            words.append(f"{option}={one_of(chance, usual, absurd)}")
    if chance.random() < 0.1:
        words.append(
            f"--profile={written(folder, 'profile.json', damaged(PROFILE, chance.randrange(2**32)))}"
        )
    if chance.random() < 0.1:
        words.append(f"--trace={written(folder, 'trace.json', damaged(TRACE, chance.randrange(2**32)))}")
    for _ in range(chance.choice([0, 0, 1, 2])):
        words += ["--overrides", f"{chance.choice(SIZES)}={one_of(chance, ['2', '32', '4096'], VALUES)}"]
    return [*words, "--format", chance.choice(["concise", "json", "markdown"])]


def plan(chance: random.Random, folder: Path) -> list[str]:
    """Return the words of a plan of a damaged file, a damaged config.json, or none."""
    files = []
    if chance.random() < 0.7:
        files.append(configuration(chance, folder))
    if chance.random() < 0.3:
        files.append(written(folder, "config.json", damaged(json.dumps(SHAPE), chance.randrange(2**32))))
    return [*files, *machine(chance, folder), *(["--details"] if chance.random() < 0.5 else [])]


def diagnose(chance: random.Random, folder: Path) -> list[str]:
    """Return the words of a diagnosis of a damaged log, at times with the damaged configuration of its run."""
    text = damaged(chance.choice(LOGS), chance.randrange(2**32))
    if chance.random() < 0.3:
        text += damaged(chance.choice(LOGS), chance.randrange(2**32))
    files = [configuration(chance, folder)] if chance.random() < 0.3 else []
    options = machine(chance, folder) if chance.random() < 0.5 else []
    return [written(folder, "train.log", text), *files, *options]


def explain(chance: random.Random, folder: Path) -> list[str]:
    """Return the words of an explanation of damaged ids."""
    ids = [damaged(chance.choice(IDS), chance.randrange(2**32)) for _ in range(chance.randint(1, 4))]
    more = [chance.choice(["--brief", "--list", "--format=json", *SPLICES])] if chance.random() < 0.5 else []
    return [*chance.sample(IDS, chance.randint(0, 2)), *ids, *more]


EXAMPLES = examples()
CONFIGURATIONS = [
    path for path in sorted(FILES.iterdir()) if path.suffix in (".yaml", ".sh", ".json", ".toml")
]
TRACE = next(iter(sorted(knowledge_path("traces").glob("*.json")))).read_text(encoding="utf-8")
PROFILE = json.dumps(
    {
        "hardware": {
            "gpu": "x", "gpus_per_node": 8, "gpu_memory_bytes": 85899345920, "host_memory_bytes": 1099511627776,
            "h2d_pinned_GBs": 55, "d2h_pinned_GBs": 55, "duplex_total_GBs": 100, "host_triad_GBs": 100,
            "cpu_adam_fused_Gparam_s": 5, "cpu_adam_perparam_fused_Gparam_s": 3, "bf16_matmul_TFLOPs": 700,
        }
    }
)  # fmt: skip
IDS = [rule.id for rule in load_rules()]
LOGS = [
    *(path.read_text(encoding="utf-8") for path in sorted(FILES.glob("*.log"))),
    *(entry["example"] for entry in knowledge.load_messages()),
    *(template.replace("{..}", "7") for rule in load_rules() for template in rule.raises),
]
COMMANDS: dict[str, Words] = {"plan": plan, "diagnose": diagnose, "explain": explain}


def called(command: str, words: list[str]) -> tuple[int, str]:
    """Call a command and return its exit code and its complaint.

    A terminal's control sequence, or a complaint of several lines, is a fault of ours.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([command, *words])
        except SystemExit as end:  # --help and --version among damaged words
            code = int(end.code or 0)
    shown = out.getvalue() + err.getvalue()
    if not shown.replace("\n", "").isprintable():
        return 3, f"not printable: {shown[:2000]!r}"
    lines = err.getvalue().count("\n")
    return (
        (code, err.getvalue())
        if lines <= 1
        else (3, f"{lines} lines on standard error: {err.getvalue()[:500]}")
    )


def campaign(inputs: int, seed: int = 0) -> int:
    """Call each command with `inputs` damaged inputs; return how many calls went wrong."""
    watch, wrong = Watch(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command, words_of in COMMANDS.items():
            codes: dict[int, int] = {}
            slowest = 0.0
            for number in range(seed, seed + inputs):
                words = words_of(random.Random(number), folder)
                before, start = len(watch.seen), time.process_time()
                with watch.watching():
                    code, err = called(command, words)
                took = time.process_time() - start
                slowest, codes[code] = max(slowest, took), codes.get(code, 0) + 1
                if code not in (0, 1, 2) or took > SLOWEST_S or len(watch.seen) > before:
                    wrong += 1
                    print(
                        f"{command} seed {number}: {code} in {took:.1f} s {watch.seen[before:]} {err[:300]}"
                    )
            print(f"{command}: {inputs} inputs, exit codes {codes}, slowest {slowest:.2f} s", flush=True)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=17_000, help="for each command")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(int(campaign(arguments.inputs, arguments.seed) > 0))
