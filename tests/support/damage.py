# SPDX-License-Identifier: Apache-2.0
"""Damages configurations and lints them: whatever is in a file, it is read and nothing else, exit code 0, 1 or 2.

    python tests/support/damage.py --inputs 20000 [--only deepspeed .py]        (make test-damage does fewer)

lints so many damaged inputs for each reader, prints one line a reader and ends with 1 where any input did more than be
read, took too long or ended otherwise. A reader is a framework with all forms of its files in turn, or a form whose
texts are of no stated framework. The fast tier does the same with a few.
"""

import argparse
import contextlib
import io
import os
import random
import re
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from skill_tools.__main__ import main
from skill_tools.dialects import registry
from skill_tools.rules.knowledge import load_rules

SLOWEST_S = 2.0
SPLICES = [
    "\n", "\t", "  ", "{", "}", "[", "]", ":", "- ", "&a ", "*a", "<<: *a\n", "!!python/object:os.system x", "'", '"',
    "|", "#", "\\", "$(", "${x:-", "`", "null", "~", "1e999", "0x", "-1", "9" * 400, "\0", "\ufeff", "\u2028", "é", "=",
    "--", "-", "def f(", "*" * 50, "---\n", "...\n", "? ", "!!binary |", "\r\n", ".inf", "${oc.env:X}", "%", "true",
    "source x.sh\n", "<<EOF\n", "`# c`", "[[", '"""', "1979-05-27", "**{", "lambda: ", "\x1b]0;x\a", "if [ 1 ]; then\n",
    "\x9b31m", "\u202e", "\x7f",
    "$(touch /tmp/never)", "__import__('os').system('x')", "//", "/*", ",", "1:1:1:1", "sys.argv = [", "@x\n", "${",
]  # fmt: skip
VALUES = [
    "0", "-1", "1.5", "1e308", "9" * 5000, "0x10", "true", "False", "null", "~", ".nan", "[]", "{}", "''",
    "[[1], {a: b}]", "cpu", "nvme", "auto", "disk", "hidden_states", "full", "selective", "x y", "$X", "${X:-1}", "é",
    "1:1:1", "2026-01-01",
]  # fmt: skip
FORMS = ("blocks", "concise", "json", "sarif", "github")

# One text a reader beside the rules' examples, so that each has at least one.
OWN = {
    ".py": [
        "from megatron.bridge.training.config import ConfigContainer\n\n\ndef r(bs=1) -> ConfigContainer:\n"
        "    cfg = _common()\n    cfg.model.cpu_offloading = True\n    for x in (1, 2):\n"
        "        cfg.model.num_layers = x\n    helper(cfg.model)\n    return cfg\n",
        "import subprocess\nfrom transformers import TrainingArguments\n\nARGS = ['--num-layers', '4']\n"
        "a = TrainingArguments(output_dir='x', learning_rate=2e-5, **more)\na.optim = 'x'\n"
        "subprocess.run(['torchrun', 'pretrain_gpt.py', *ARGS, '--bf16'])\n",
    ],
    ".yaml": [
        "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n    - command: [torchrun, pretrain_gpt.py]\n"
        "      args: [--num-layers=4, --bf16]\n",
        "resources: {accelerators: x}\nrun: |\n  torchrun pretrain_gpt.py \\\n    --num-layers 4\n",
        '"pipe_parallel_size": 1\n"zero_optimization": {"stage": 1}\n',
    ],
    ".toml": [
        '[job]\ndump_folder = "x"\n\n[training]\nlocal_batch_size = 8\nsteps = 1_000\n\n[parallelism]\n'
        "data_parallel_shard_degree = -1\n[[a.b]]\nc = {d = [1, 2.5e3, 1979-05-27]}\n",
    ],
    ".sh": [
        'source env.sh\nEXTRA="`date` --bf16"\nARGS=(--num-layers 4)\nif [ -z "$X" ]; then ARGS+=(--x "${Y:-1}"); fi\n'
        "case $X in a) B=1;; esac\ntorchrun pretrain_gpt.py ${ARGS[@]} $EXTRA <<EOF\nx\nEOF\n",
    ],
}  # fmt: skip


def examples() -> dict[str, list[tuple[str, str]]]:
    """Return texts to damage, each after its framework or "", by the suffix of their reader; "" is overrides."""
    texts = {suffix: [("", text) for text in own] for suffix, own in OWN.items()}
    for rule in load_rules():
        for name, example in rule.examples.items():
            suffix = "" if example.filename == "<overrides>" else os.path.splitext(example.filename)[1]
            held = texts.setdefault({".yml": ".yaml"}.get(suffix, suffix), [])
            held += [(name, example.bad), (name, example.good)]
    return texts


def damaged(text: str, seed: int) -> str:
    """Return `text` with a few pieces cut, doubled, swapped or spliced in, or only with a few other values."""
    chance = random.Random(seed)
    if chance.random() < 0.4:
        for _ in range(chance.randint(1, 4)):
            found = chance.choice(list(re.finditer(r"(?<=[:= ])[\w.-]+", text)) or [None])
            if found:
                text = text[: found.start()] + chance.choice(VALUES) + text[found.end() :]
        return text
    for _ in range(chance.choice([1, 1, 2, 3, 6])):  # one wound often leaves a text that is read to the end
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.randint(0, 30))
        piece = chance.choice(
            ["", text[start:end] * 2, chance.choice(SPLICES), chance.choice(SPLICES) + text[start:end]]
        )
        text = text[:start] + piece + text[end:]
    return text


def lint_text(filename: str, data: bytes, *more: str) -> tuple[int, str]:
    """Lint `data` as standard input; return the exit code and standard error.

    A terminal's control sequence in either output is a fault of ours, except in a difference, which is for `patch`.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "stdin") as stdin,
    ):
        stdin.buffer = io.BytesIO(data)
        code = main(["lint", "--stdin", "--stdin-filename", filename, *more])
    shown = err.getvalue() if "--diff" in more else out.getvalue() + err.getvalue()
    if not shown.replace("\n", "").isprintable():
        return 3, f"not printable: {shown[:2000]!r}"
    return code, err.getvalue()


def lint_damaged(suffix: str, example: tuple[str, str], seed: int) -> tuple[int, str]:
    """Damage an example and lint it, as its own framework's, as any, or without a stated one."""
    framework, text = example
    chance = random.Random(seed)
    stated = chance.choice(
        [framework or "axolotl", framework or "axolotl", chance.choice(registry.with_files()).name]
    )
    more = ["--format", chance.choice(FORMS), *(["--framework", stated] if chance.random() < 0.7 else [])]
    more += ["--diff", "--unsafe-fixes"] if chance.random() < 0.1 else []
    hurt = damaged(text, seed)
    if suffix:
        return lint_text(f"x{suffix}", hurt.encode("utf-8", "surrogatepass"), *more)
    return lint_text("x.yaml", b"", f"--overrides={hurt}", *more)


class Watch:
    """Notes every event of this process that is more than reading, while it is on."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._on = False
        sys.addaudithook(self._note)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs. Python keeps no bytecode meanwhile, whose files would count as ours."""
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        self._on = True
        try:
            yield
        finally:
            self._on = False
            sys.dont_write_bytecode = before

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        acts = event.startswith(
            ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.")
        )
        changes = event in (
            "os.remove",
            "os.rename",
            "os.mkdir",
            "os.rmdir",
            "os.chmod",
            "os.truncate",
            "shutil.move",
        )
        if acts or changes or (event == "open" and _writes(args)):
            self.seen.append(f"{event} {args!r}"[:200])


def _writes(args: tuple[Any, ...]) -> bool:
    path, mode, flags = args
    if str(path).endswith(".pyc") or ".pyc." in str(path):  # Python's own, of a module that is loaded late
        return False
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def readers() -> dict[str, list[list[tuple[str, tuple[str, str]]]]]:
    """Return each reader's text to damage: of each form its texts, with suffix and framework."""
    found: dict[str, dict[str, list[tuple[str, tuple[str, str]]]]] = {}
    for suffix, texts in examples().items():
        for framework, text in texts:
            forms = found.setdefault(framework or suffix, {})
            forms.setdefault(suffix, []).append((suffix, (framework, text)))
    return {name: list(forms.values()) for name, forms in sorted(found.items())}


def campaign(inputs: int, seed: int = 0, only: Collection[str] = ()) -> int:
    """Lint `inputs` damaged texts for each reader, or for those in `only`; return how many went wrong."""
    watch, wrong = Watch(), 0
    for reader, forms in readers().items():
        if only and reader not in only:
            continue
        codes = {0: 0, 1: 0, 2: 0}
        slowest = 0.0
        for number in range(inputs):
            texts = forms[number % len(forms)]
            suffix, text = texts[number // len(forms) % len(texts)]
            before, start = len(watch.seen), time.process_time()
            with watch.watching():
                code, err = lint_damaged(suffix, text, seed + number)
            took = time.process_time() - start
            slowest = max(slowest, took)
            codes[code] = codes.get(code, 0) + 1
            if code not in (0, 1, 2) or took > SLOWEST_S or len(watch.seen) > before:
                wrong += 1
                print(
                    f"{reader} {suffix} seed {seed + number}: {code} in {took:.1f} s {watch.seen[before:]} {err[:300]}"
                )
        print(f"{reader}: {inputs} inputs, exit codes {codes}, slowest {slowest:.2f} s", flush=True)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], choices=readers(), help="default: every reader")
    arguments = parser.parse_args()
    sys.exit(int(campaign(arguments.inputs, arguments.seed, arguments.only) > 0))
