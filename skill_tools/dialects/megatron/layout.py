# SPDX-License-Identifier: Apache-2.0
"""The layout of a run: how many GPUs, how the framework's own sizes divide them, and whether the model divides too.

A model that does not divide is refused, as Megatron would refuse it after the nodes have started.
"""

import math
import re
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.configs.values import whole_number
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.layout import Layout, checked, smallest_world
from skill_tools.dialects.megatron import BRIDGE
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput

_DIGITS = 5  # of a repetition; more layers than that are wrong whatever the rest is
_SIZES = (
    ("tensor_model_parallel_size", "TP"),
    ("pipeline_model_parallel_size", "PP"),
    ("expert_model_parallel_size", "EP"),
)
_UNEVEN = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


class FoundLayout(NamedTuple):
    """The layout, and the assumptions about it."""

    layout: Layout
    assumptions: tuple[Assumption, ...]


def of_megatron(config: Config, *, gpus: int | None, num_layers: int, moe: bool) -> FoundLayout:
    """Read Megatron's parallel sizes; `gpus` wins over the configuration's own world."""
    assumptions = []
    tensor = _size(config, "tensor_model_parallel_size")
    pipeline = _size(config, "pipeline_model_parallel_size")
    context = _size(config, "context_parallel_size")
    expert = _size(config, "expert_model_parallel_size") if moe else 1
    own = fields.integer(config, "expert_tensor_parallel_size")
    expert_tensor = 1
    if moe:
        expert_tensor = own or tensor
        if own is None and tensor > 1 and not config.complete:
            expert_tensor = 1
            assumptions.append(
                Assumption(
                    "expert tensor parallel size 1: not set here, and Bridge's MoE recipes set it to 1"
                )
            )
    sizes = [each for each in _SIZES[: 3 if moe else 2] if each[0] not in config.unresolved]
    unset = [short for key, short in sizes if fields.integer(config, key) is None]
    if unset and not config.complete:
        *first, last = unset
        named = f"{', '.join(first)} and {last}" if first else last
        assumptions.append(
            Assumption(
                f"{named} 1: not set here, a recipe may set it",
                About.LAYOUT,
                "give the recipe before this file, or --overrides with its sizes",
            )
        )
    chunks = _virtual_stages(config, num_layers, pipeline)
    world = gpus or fields.integer(config, "world_size", "env.WORLD_SIZE") or _launched(config)
    if world is None:
        world = smallest_world((tensor, pipeline, context, expert, expert_tensor))
        assumptions.append(
            Assumption(f"{world} GPUs: the fewest that this layout needs; say --gpus N for yours", About.GPUS)
        )
    layout = Layout(
        gpus=world,
        tensor=tensor,
        pipeline=pipeline,
        virtual_stages=chunks,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence_parallel=bool(fields.flag(config, "sequence_parallel")) or (moe and tensor > 1),
        stage_layers=_stage_layers(config, num_layers, pipeline, chunks),
    )
    if moe and tensor > 1 and not fields.flag(config, "sequence_parallel"):
        assumptions.append(
            Assumption("sequence parallelism on: Megatron requires it for experts with TP > 1")
        )
    return FoundLayout(checked(layout), tuple(assumptions))


def _size(config: Config, key: str) -> int:
    size = fields.integer(config, key)
    if size is None:
        return 1
    if size < 1:
        raise UnusableInput(f"{key} = {size}", expected="1 or more", attempt=f"{key}=1")
    return size


def _launched(config: Config) -> int | None:
    """Return the world size that a launch line says: nodes times processes on a node."""
    for text in config.sources.values():
        per_node = _launch_number(text, "nproc")
        if per_node is not None:
            return per_node * (_launch_number(text, "nnodes") or 1)
    return None


def _launch_number(text: str, option: str) -> int | None:
    """Return the number after torchrun's `--nproc_per_node` or `--nnodes`, also through one shell variable."""
    match = re.search(rf"--{option}[a-z_-]*[ =]+(\$\{{?(\w+)\}}?|\d+)", text)
    if match is None:
        return None
    if match.group(2) is None:
        return whole_number(match.group(1))
    assigned = re.search(
        rf"^\s*(?:export )?{match.group(2)}=(?:\$\{{\w+:-)?(\d+)\}}?\s*$", text, re.MULTILINE
    )
    return whole_number(assigned.group(1)) if assigned else None


def _virtual_stages(config: Config, num_layers: int, pipeline: int) -> int:
    chunks = fields.integer(config, "virtual_pipeline_model_parallel_size")
    if chunks is not None:
        return max(chunks, 1)
    each = fields.integer(config, "num_layers_per_virtual_pipeline_stage")
    if each and config.framework != BRIDGE:
        return max(num_layers // (pipeline * each), 1)
    written = fields.text(config, "pipeline_model_parallel_layout")
    if written and pipeline > 1:
        return max(len(_expanded(written)) // pipeline, 1)
    return 1


def _stage_layers(config: Config, num_layers: int, pipeline: int, chunks: int) -> tuple[int, ...]:
    written = fields.text(config, "pipeline_model_parallel_layout")
    if written and pipeline > 1:
        return tuple(stage.count("t") for stage in _expanded(written))
    first = fields.integer(config, "num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers")
    last = fields.integer(config, "num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers")
    if (first is None and last is None) or chunks != 1 or pipeline < 2:
        return ()
    middle = pipeline - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    between = (
        () if middle == 0 else tuple(rest // middle + (1 if i < rest % middle else 0) for i in range(middle))
    )
    return (*(() if first is None else (first,)), *between, *(() if last is None else (last,)))


def _expanded(layout: str) -> list[str]:
    """Expand Megatron's stage notation: `Et*3|(tt|)*2mL` is `Ettt|tt|tt|mL`; `m` and `L` are MTP and loss."""
    text = layout.replace(" ", "")
    position, pieces = 0, []
    while position < len(text):
        if text[position] == "(":
            end = text.find(")", position)
            if end < 0:
                raise UnusableInput(
                    f"pipeline_model_parallel_layout = {layout!r} opens a bracket that it does not close",
                    expected="stages such as Et*3|(tt|)*14L",
                    attempt="correct the layout",
                )
            unit, position = text[position + 1 : end], end + 1
        else:
            unit, position = text[position], position + 1
        times, position = _times(text, position)
        pieces.append(unit * times)
    return "".join(pieces).split("|")


def _times(text: str, position: int) -> tuple[int, int]:
    if not text.startswith("*", position):
        return 1, position
    end = position + 1
    while end < len(text) and text[end].isdecimal():
        end += 1
    return int(text[position + 1 : end][:_DIGITS] or 1), end


def check(shape: ModelShape, layout: Layout, config: Config) -> tuple[Assumption, ...]:
    """Raise `UnusableInput` for groups that do not divide their shared part; return the assumptions.

    Pipeline stages may have different numbers of layers, as the configuration or its recipe says.
    """
    _divides(shape.heads, "attention heads", layout.tensor, "tensor_model_parallel_size")
    if shape.experts:
        _divides(shape.experts, "experts", layout.expert, "expert_model_parallel_size")
    chunks = layout.pipeline * layout.virtual_stages
    if layout.stage_layers or any(config.value(key) for key in _UNEVEN) or shape.num_layers % chunks == 0:
        return ()
    if config.complete:
        name = "pipeline_model_parallel_size" + (" x virtual stages" if layout.virtual_stages > 1 else "")
        _divides(shape.num_layers, "layers", chunks, name)
    said = f"{shape.num_layers} layers over {chunks} stages as evenly as they go: a recipe may say otherwise"
    return (Assumption(said),)


def _divides(count: int, divided: str, size: int, name: str) -> None:
    if count % size == 0:
        return
    small = [each for each in range(1, math.isqrt(count) + 1) if count % each == 0]
    nearest = max(each for low in small for each in (low, count // low) if each < size)
    raise UnusableInput(
        f"{count} {divided} do not divide over {name} = {size}",
        expected=f"a divisor of {count}",
        attempt=f"{name.split(' ')[0]}={nearest}",
    )
