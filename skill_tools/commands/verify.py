# SPDX-License-Identifier: Apache-2.0
"""Train a small decoder without offload and with each mechanism, and compare losses, parameters, memory and time.

  offload verify                    on the CUDA device if there is one, else on its CPU twin
  offload verify --device cpu --format json
  offload verify --pinned-memory 1GB  under a limit on pinned host memory: further memory is pageable
  offload verify --plan plan.json   the plan's own model, with and without the plan: predicted and measured

Exit codes: 0 every loss agrees (bitwise where promised, else within 0.001) and every peak is within 5 percent of the
prediction, 1 one does not, 2 unusable input or no torch, 3 a fault of this tool.
"""

import argparse
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from skill_tools.bundle import to_install
from skill_tools.errors import UnusableInput
from skill_tools.reports import measuring
from skill_tools.reports.measuring import OnStep, progress
from skill_tools.units import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the plan, the device and the output."""
    parser.add_argument(
        "--plan", metavar="FILE", help="output of `offload plan --framework pytorch --format json`"
    )
    parser.add_argument(
        "--pinned-memory", metavar="AMOUNT", help="page-lock at most so much host memory, such as 1GB"
    )
    add_device(parser)
    parser.add_argument("--format", choices=("concise", "json"), default="concise", help="default: concise")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device that a command trains or measures on."""
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu; default: CUDA if there is one")


def run(args: argparse.Namespace) -> int:
    """Verify and print; raises `UnusableInput` without torch or for a device that is not there."""
    # Read when torch starts: without it a block may have up to 1 MiB more than was asked for, and peaks are judged.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = chosen_device(args.device)
    with progress() as on_step, _limit(args.pinned_memory) as pinned:
        document = _mechanisms(device, on_step) if args.plan is None else _plan(device, args.plan, on_step)
        document = {**document, **pinned()}
    if args.format == "json":
        print(json.dumps(document, indent=2))
    else:
        print(measuring.verification(document) if args.plan is None else measuring.verified_plan(document))
    return 0 if document["passed"] else 1


def chosen_device(name: str | None) -> Any:
    """Return the device called `name`, or the default; raises `UnusableInput` for a missing one."""
    try:
        return reference("reference_impl.device").Device.available(name)
    except (ValueError, RuntimeError) as error:
        raise UnusableInput(
            f"--device {name}: {str(error).splitlines()[0]}",
            expected="cuda, cuda:N or cpu",
            attempt="--device cpu",
        ) from None


@contextmanager
def _limit(amount: str | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Limit page-locked memory to `amount`; yield a function that says how much there was. Raises `UnusableInput`."""
    if amount is None:
        yield dict
        return
    module = reference("reference_impl.memory.pinned")
    try:
        limit = module.limit_pinned_memory(parse_bytes(amount, option="--pinned-memory"))
    except ValueError as error:
        raise UnusableInput(
            f"--pinned-memory {amount}: {error}", expected="1 MiB or more", attempt="--pinned-memory 1GB"
        ) from None
    book = module.pinned_book
    with limit:
        yield lambda: {"pinned": {"limit_bytes": book.limit_bytes, "peak_bytes": book.peak_bytes}}


def _mechanisms(device: Any, on_step: OnStep) -> Mapping[str, Any]:
    verify = reference("reference_impl.verification.verify")
    document: Mapping[str, Any] = verify.verify(device, progress=on_step).document()
    return document


def _plan(device: Any, path: str, on_step: OnStep) -> Mapping[str, Any]:
    """Train the plan in `path`; raises `UnusableInput` for an untrainable one."""
    planned_run = reference("reference_impl.verification.planned_run")
    verify_plan = reference("reference_impl.verification.verify_plan")
    try:
        planned = planned_run.read_plan(path)
        document: Mapping[str, Any] = verify_plan.verify_plan(device, planned, progress=on_step).document()
    except planned_run.PlanError as error:
        raise UnusableInput(error.problem, expected=error.expected, attempt=error.attempt) from None
    return document


def reference(module: str) -> Any:
    """Load a module of `reference_impl`, which needs torch."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "numpy", "reference_impl"}:
            raise
        raise UnusableInput(
            f"{error.name} is not installed",
            expected="the extra that trains on this machine",
            attempt=to_install("reference"),
        ) from None
