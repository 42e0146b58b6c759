# SPDX-License-Identifier: Apache-2.0
"""Choose an offload for a configuration and a GPU: its mode, amount and cost, and the lines to change.

Reads your own configuration (as `lint` does), a model's Hugging Face config.json, or only a model's name:

  offload plan run.yaml --gpu-memory 80GiB --gpus 16
  offload plan run.yaml --model qwen3-30b-a3b --gpu h100 --what-if model.seq_length=8192
  offload plan --model llama-3-8b --gpu rtx4090 --overrides seq_length=4096
  offload plan --list-models

Exit codes: 0 a plan that fits, 2 unusable input or no fitting plan, 3 a fault of this tool. For an unknown model it
prints the card's decision table and exits with 2.
"""

import argparse
import os
import sys

from skill_tools.commands import plan_inputs, plan_request, releases
from skill_tools.errors import NotPlannedError, UnusableInput, printable, printable_lines
from skill_tools.planning.model import known_models, shape_sources
from skill_tools.planning.model.shape_sources import UnknownShapeError
from skill_tools.planning.search.options import HOST_MEMORY, PINNED_MEMORY
from skill_tools.planning.search.planner import Plan
from skill_tools.units import at_least_gib, gib

FORMATS = ("concise", "json", "markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the inputs, of the run and of the output."""
    parser.add_argument(
        "inputs", nargs="*", metavar="FILE", help="configuration files; a model's config.json, or its folder"
    )
    plan_request.add_arguments(parser)
    parser.add_argument(
        "--list-models", action="store_true", help="print the names that --model accepts, and exit"
    )
    parser.add_argument(
        "--activation-memory",
        metavar="AMOUNT",
        help="GPU memory of activations, for LoRA of an image or video model with block swap",
    )
    parser.add_argument("--format", choices=FORMATS, default="concise", help="default: concise")
    parser.add_argument(
        "--details",
        action="store_true",
        help="add the table, the memory and time line by line, all assumptions",
    )
    parser.add_argument(
        "--all",
        nargs="?",
        const="time",
        choices=("gpu", "host", "time"),
        metavar="ORDER",
        help="print a table of all legal plans instead, by gpu (memory), host (memory) or time (default)",
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="print the changes of --write instead of the plan, write nothing",
    )
    parser.add_argument("--write", action="store_true", help="write the plan's change into the files")
    parser.add_argument("--plot", metavar="FILE", help="draw the plan to FILE.svg, FILE.png or FILE.html")
    parser.add_argument("--force", action="store_true", help="let --plot overwrite a file without asking")


def run(args: argparse.Namespace) -> int:
    """Plan and print; raises `UnusableInput` when there is nothing to plan with, or nothing that fits."""
    if args.list_models:
        print("\n".join(sorted(known_models.entries())))
        return 0
    plan_request.check(args)
    try:
        plan = plan_request.make_plan(args, args.inputs)
    except UnknownShapeError as unknown:
        if not args.inputs:
            raise
        return _by_situation(args, unknown)
    except NotPlannedError as refused:
        from skill_tools.commands import plan_blocks

        return plan_blocks.answer(args, refused)
    if args.activation_memory is not None:
        raise UnusableInput(
            "--activation-memory for a run whose activations are counted",
            expected="it for a LoRA of an image or video model whose blocks swap",
            attempt="the same without it",
        )
    if args.plot and plan.recommendation is not None:
        from skill_tools.reports import plots

        plots.write(plan, args.plot, may_overwrite=args.force or _overwrites(args.plot))
    texts = _texts(plan, args)
    if args.all:
        from skill_tools.reports import plans

        print(printable_lines(plans.every(plan, args.all)))
    elif not args.diff:
        show(plan, args)
    if args.write and plan.recommendation is not None:
        from skill_tools.commands import plan_write

        plan_write.write(texts)
    if plan.recommendation is None:
        print(f"offload: {_nothing_fits(plan, are_shown=not args.diff)}", file=sys.stderr)
        return 2
    return 0


def _texts(plan: Plan, args: argparse.Namespace) -> dict[str, str]:
    """Return the change of --write or --diff; none without either, or if nothing fits."""
    if not (args.write or args.diff) or plan.recommendation is None:
        return {}
    if args.what_if:
        raise UnusableInput(
            "--write and --diff with --what-if: its values are not in the files",
            expected="the files as they are",
            attempt="the plan of the files without --what-if",
        )
    from skill_tools.commands import plan_write

    files = [
        path for path in args.inputs if not os.path.isdir(path) and not shape_sources.is_config_json(path)
    ]
    config = plan_inputs.read_config(args, files)
    texts = plan_write.changed_texts(plan, config)
    if args.diff:
        plan_write.show(texts, config)
    return texts


def _overwrites(path: str) -> bool:
    """Ask whether the file at `path` may be overwritten, where there is one and somebody to ask."""
    if not os.path.lexists(path) or not sys.stdin.isatty():
        return False
    return input(f"{printable(path)} exists; overwrite it? [y/N] ").strip().lower() in {"y", "yes"}


def show(plan: Plan, args: argparse.Namespace) -> None:
    """Print the plan in the form that was asked for."""
    if args.format == "json":
        from skill_tools.reports.plans_json import as_json

        print(as_json(plan))
    else:
        from skill_tools.reports import plans

        render = plans.markdown if args.format == "markdown" else plans.concise
        print(printable_lines(render(plan, details=args.details)))


def _by_situation(args: argparse.Namespace, unknown: UnknownShapeError) -> int:
    """Print the card's decision table, name the missing sizes on stderr, and end as unusable input does."""
    from skill_tools.planning.search import situations
    from skill_tools.reports import plans, plans_json

    files = [path for path in args.inputs if not shape_sources.is_config_json(path)]
    config = plan_inputs.read_config(args, files)
    stated = releases.of_run(args, config, files)
    rows = situations.table(config, {name: each.version for name, each in stated.items()})
    if args.format == "json":
        print(plans_json.situations_as_json(rows, str(unknown)))
    else:
        render = plans.situations_markdown if args.format == "markdown" else plans.situations_concise
        print(printable_lines(render(rows)))
    print(f"offload: {unknown}", file=sys.stderr)
    return 2


def _nothing_fits(plan: Plan, *, are_shown: bool) -> UnusableInput:
    """Return the error if no plan fits; `are_shown`: the ways to fit were printed."""
    floor = plan.floor.memory
    needs = f"{at_least_gib(floor.device_bytes / (1 - plan.budget.headroom))} a GPU"
    problem = f"nothing legal fits {gib(plan.budget.gpu_bytes)} a GPU"
    if plan.floor.limit == HOST_MEMORY and plan.budget.host_bytes is not None:
        problem += f" and {gib(plan.budget.host_bytes)} of host memory a node"
        needs += f" and {at_least_gib(floor.host_bytes_per_node / (1 - plan.budget.headroom))} of host memory a node"
    if plan.floor.limit == PINNED_MEMORY and plan.budget.pinned_bytes is not None:
        problem += f" and {gib(plan.budget.pinned_bytes)} of pinned memory a node"
        needs += f" and {at_least_gib(floor.pinned_bytes_per_node)} of pinned memory a node"
    free = f", {plan.budget.headroom:.0%} left free" if plan.budget.headroom else ""
    ways = "one of the ways above" if are_shown else "the same without --diff, which prints ways to fit"
    return UnusableInput(
        problem,
        expected=f"at least {needs}{free} ({plan.floor.candidate.label})",
        attempt=ways if plan.ways else "a smaller model, or more memory",
    )
