# SPDX-License-Identifier: Apache-2.0
"""How much of an image or video model to keep on the host: `plan` answers this for a LoRA, where it plans no run.

Apart because only these trainers' runs load it.
"""

import argparse
import os
import sys

from skill_tools.commands import plan_inputs, plan_request
from skill_tools.dialects import registry
from skill_tools.dialects.assumptions import About
from skill_tools.dialects.block_swap import swapping
from skill_tools.errors import NotPlannedError, UnusableInput, printable_lines
from skill_tools.planning.model import shape_sources, swapped_blocks
from skill_tools.planning.model.memory import CONTEXT_BYTES
from skill_tools.reports import swapped_blocks as reports
from skill_tools.units import gib, parse_bytes

_OF_OTHER_PLANS = ("write", "diff", "plot", "all", "model", "trace", "only", "without")


def answer(args: argparse.Namespace, refused: NotPlannedError) -> int:
    """Print the answer; raises `refused` for a framework whose blocks are not counted.

    Returns 0, or 2 where not even the most leaves room. Raises `UnusableInput` for options of other plans.
    """
    files = [
        path for path in args.inputs if not os.path.isdir(path) and not shape_sources.is_config_json(path)
    ]
    config = plan_inputs.read_to_plan(args, files, args.what_if)
    on_host = registry.named(config.framework).block_swap(config)
    if on_host is None:
        raise refused
    for name in _OF_OTHER_PLANS:
        if vars(args)[name]:
            raise UnusableInput(
                f"--{name} where only {on_host.run.option} is planned",
                expected="the machine and --activation-memory",
                attempt=f"the same without --{name}, and the answer in your own input",
            )
    plan_request.check_gpus(args)
    where = plan_request.machine_of(args, args.gpus or 1)
    budget, notes = plan_request.budget_of(args, where)
    reserved = round(budget.headroom * budget.gpu_bytes)
    reserved += CONTEXT_BYTES if args.tensor_memory is None else 0
    counts = swapped_blocks.counts(on_host, budget.gpu_bytes - reserved)
    wanted = (
        swapping.assumed_activations_bytes()
        if args.activation_memory is None
        else parse_bytes(args.activation_memory, option="--activation-memory")
    )
    found = reports.Answer(
        dialect=config.framework,
        on_host=on_host,
        counts=counts,
        chosen=next((each for each in counts if each.room_bytes >= wanted), None),
        activations_bytes=wanted,
        is_assumed=args.activation_memory is None,
        gpu_bytes=budget.gpu_bytes,
        reserved_bytes=reserved,
        where=where,
        host_limit_bytes=budget.host_bytes,
        notes=[
            *config.missing_file_notes(),
            *(each.text for each in notes if not (where.stands_for and each.about is About.MACHINE)),
        ],
    )
    print(reports.as_json(found) if args.format == "json" else printable_lines(reports.as_text(found)))
    if found.chosen is not None:
        return 0
    needs = UnusableInput(
        f"no value of {on_host.run.option} leaves {gib(wanted)} for activations",
        expected="a larger GPU, or less for activations",
        attempt=f"{on_host.run.smaller}, or --activation-memory with yours",
    )
    print(f"offload: {needs}", file=sys.stderr)
    return 2
