# SPDX-License-Identifier: Apache-2.0
"""Run a training program and report the owners of its GPU and host bytes, live and at its end, against a plan.

  offload watch -- python train.py
  offload watch --plan plan.json -- torchrun --nproc-per-node 2 train.py
  offload watch --every 30 -- python train.py 2> watch.log

Weights, gradients, optimizer states, activations and the buffers of offloaders are told apart in every
process that steps a torch optimizer; a plan applied by the program itself is found. Nothing in the program
changes. On a terminal the last row shows it live, elsewhere a line appears every 10 seconds, on standard
error.

The exit code is the program's (128 plus the number of a fatal signal), or 2 if it cannot be started.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the plan, the interval and the program."""
    parser.add_argument(
        "--plan", metavar="FILE", help="output of `offload plan --format json` to compare with"
    )
    parser.add_argument(
        "--every", type=float, default=10, metavar="S", help="seconds between lines in a pipe; default: 10"
    )
    parser.usage = f"{COMMAND} watch [--plan FILE] [--every S] -- PROGRAM [ARGUMENT ...]"
    parser.set_defaults(program=[])  # the program and its arguments, behind the two dashes


def run(args: argparse.Namespace) -> int:
    """Run the program; raises `UnusableInput` where there is none, or the plan is none."""
    if not args.program:
        raise UnusableInput(
            "no program", expected="two dashes and a command", attempt=f"{COMMAND} watch -- python train.py"
        )
    if not 0.1 <= args.every < math.inf:
        raise UnusableInput(f"--every {args.every}", expected="0.1 seconds or more", attempt="--every 10")
    if sys.platform != "linux":
        raise UnusableInput(
            f"offload watch on {sys.platform}",
            expected="Linux, whose signals it hands on",
            attempt="cpu_offloading.watch() in the program",
        )
    plan = None if args.plan is None else _plan(Path(args.plan))
    from offload_watch.run import watch

    sys.stdout.flush()
    try:
        return watch(args.program, plan, every_s=args.every, stream=sys.stderr)
    except OSError as error:
        raise UnusableInput(
            f"{args.program[0]}: {error.strerror}",
            expected="a program that can be started",
            attempt=f"{COMMAND} watch -- python train.py",
        ) from None


def _plan(path: Path) -> Mapping[str, Any]:
    from offload_watch.report import planned

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableInput(
            f"--plan {path}: {error.strerror if isinstance(error, OSError) else error}",
            expected="a plan as JSON",
            attempt=f"{COMMAND} plan ... --format json > FILE",
        ) from None
    if planned(document) is None:
        raise UnusableInput(
            f"--plan {path}: predicts nothing that can be compared",
            expected="a plan with a recommendation",
            attempt=f"{COMMAND} plan ... --format json > FILE",
        )
    found: Mapping[str, Any] = document
    return found
