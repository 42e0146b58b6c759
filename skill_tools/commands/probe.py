# SPDX-License-Identifier: Apache-2.0
"""Measure this machine in at most 20 seconds: copies, memory, launches, updates on CPU and device, disk.

  offload probe                       print the rates, and keep a GPU's for `offload plan` on this machine
  offload probe --out profile.json    also write them, for `offload plan --profile profile.json`

Run it on an idle machine. Exit codes: 0 measured, 2 unusable input or no torch, 3 a fault of this tool.
"""

import argparse
import json
import sys
from pathlib import Path

from skill_tools.commands.verify import add_device, chosen_device, reference
from skill_tools.configs.files import check_writable, write_text
from skill_tools.errors import UnusableInput
from skill_tools.planning.cost import kept_profile
from skill_tools.reports import measuring
from skill_tools.reports.measuring import progress
from skill_tools.started import COMMAND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device, the disk and the output."""
    add_device(parser)
    parser.add_argument(
        "--disk", metavar="FOLDER", help="a folder on the disk to measure; default: the temporary folder"
    )
    parser.add_argument("--out", metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--format", choices=("concise", "json"), default="concise", help="default: concise")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; raises `UnusableInput` without torch, room, or a folder to write to."""
    if args.disk:
        _check_disk(args.disk)
    if args.out:
        check_writable(args.out)
    probe = reference("reference_impl.verification.probe")
    device = chosen_device(args.device)
    try:
        with progress() as on_step:
            document = probe.probe(device, folder=args.disk, progress=on_step)
    except (OSError, MemoryError) as error:
        raise UnusableInput(
            str(error),
            expected="room on disk and host",
            attempt="--disk with another folder, or an idle machine",
        ) from None
    text = json.dumps(document, indent=2)
    if args.out:
        write_text(args.out, text + "\n")
    kept = kept_profile.keep(document) if device.is_accelerator else None
    if kept is not None:
        print(f"kept in {kept}: {COMMAND} plan finds it there", file=sys.stderr)
    print(text if args.format == "json" else measuring.profile(document))
    return 0


def _check_disk(folder: str) -> None:
    if not Path(folder).is_dir():
        raise UnusableInput(
            f"--disk {folder} is no folder", expected="a folder that exists", attempt=f"mkdir {folder}"
        )
