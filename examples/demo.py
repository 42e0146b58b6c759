# SPDX-License-Identifier: Apache-2.0
"""The main job from end to end: lint a broken configuration, plan the right offload for it, verify the mechanisms here.

    make demo

It calls the commands as a shell would: `offload lint`, `offload plan` and `offload verify`.
"""

import sys
from pathlib import Path

from skill_tools.__main__ import main

CONFIG = str(Path(__file__).with_name("broken_bridge.yaml"))
RELEASES = ["--target", "megatron-core==0.19.0", "--target", "transformer-engine==2.12.0"]

# The question, the command, and the expected exit code: lint must find the faults.
STEPS = (
    ("What is wrong with this configuration?", ["lint", CONFIG, *RELEASES], 1),
    (
        "Which offload does it need on 40 GiB GPUs?",
        [
            "plan",
            CONFIG,
            "--model",
            "qwen3-30b-a3b",
            "--gpus",
            "16",
            "--gpu",
            "h100",
            "--gpu-memory",
            "40GiB",
        ],
        0,
    ),
    ("Do the mechanisms keep their promises on this machine?", ["verify"], 0),
)


def demo() -> int:
    """Run the three steps; return 0 if each exits as expected."""
    as_expected = True
    for number, (question, command, expected) in enumerate(STEPS, start=1):
        print(f"\n== {number} of {len(STEPS)}: {question}\n$ offload {' '.join(command)}\n", flush=True)
        as_expected &= main(command) == expected
    print(f"\n== {'lint, plan and verify worked as expected' if as_expected else 'a step failed, see above'}")
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(demo())
