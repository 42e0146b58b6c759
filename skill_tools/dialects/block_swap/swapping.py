# SPDX-License-Identifier: Apache-2.0
"""How musubi-tuner or sd-scripts swaps the blocks of a model: `knowledge/block_swap.yaml`, read for one run.

Both trainers keep exactly the unswapped blocks on the GPU: an incoming block takes the storage of the outgoing one
(`custom_offloading_utils.py::ModelOffloader`). musubi-tuner's `--block_swap_h2d_only` has a ring of buffers beside
them, for each list of blocks.
"""

from collections.abc import Iterator
from typing import Any

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.block_swap.on_host import BlockList, BlockSwap, Run
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

_RANK = 4  # of both trainers, where --network_dim is not given
WEIGHT_AND_GRADIENT = 8  # bytes of a LoRA's parameter, both fp32
_ADAM, _ADAM_8BIT = 8, 2  # bytes of the moments of one parameter
_READ = frozenset(
    {"--network_dim", "blocks_to_swap", "block_swap_ring_size", "musubi.num_layers", "musubi.task"}
)
_MOST_BLOCKS = 1000
_SCALED = 64  # weights of scaled fp8 that share one bf16 scale


def assumed_activations_bytes() -> int:
    """Return the default bytes for activations."""
    found: int = knowledge.index()["block_swap"]["activations"]["bytes"]
    return found


def of_config(config: Config) -> BlockSwap:
    """Return the blocks of the run in `config`; raises `UnusableInput` for a program without counted blocks."""
    program = fields.text(config, f"{config.framework.partition('-')[0]}.program") or ""
    row = row_of(config, program)
    if row is None or fields.text(config, "--model_type") == "chroma":
        programs = knowledge.index()["block_swap"]["programs"][config.framework]
        raise UnusableInput(
            f"the blocks of {program or 'a program that the input does not name'} are not counted for this model",
            expected=f"a LoRA by one of {', '.join(programs)} (of SD3 a checkpoint called large or 3.5_medium)",
            attempt=f"{COMMAND} plan with a script of one of these",
        )
    return _built(config, row, model_of(row))


def row_of(config: Config, program: str) -> dict[str, Any] | None:
    """Return the row of the model that `program` trains by the words of the input, None if nobody counted it."""
    rows = knowledge.index()["block_swap"]["programs"][config.framework].get(program, ())
    return next((each for each in rows if _is_about(each, config)), None)


def model_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a row's model."""
    found: dict[str, Any] = knowledge.index()["block_swap"]["models"][row["model"]]
    return found


def _is_about(row: dict[str, Any], config: Config) -> bool:
    value = (fields.text(config, row["option"]) or "").lower() if "option" in row else ""
    return "words" not in row or any(word in value for word in row["words"]) or (not value and "unset" in row)


def _built(config: Config, row: dict[str, Any], model: dict[str, Any]) -> BlockSwap:
    one, is_scaled, weights = _precision(config)
    stay = 1 if one == 1 and not is_scaled else max(one, 2)
    lists = []
    for each in model["lists"]:
        swapped = row.get("swapped", {}).get(each["name"], each["swapped"])
        wide = row.get("bf16", {}).get(each["name"], 0) if is_scaled else 0
        scales = 2 * (swapped - wide) // _SCALED if is_scaled else 0
        moved = one * (swapped - wide) + 2 * wide
        stays = stay * (each["parameters"] - swapped) + scales
        length = _length(config, row) or each["count"]
        sizes = (each["linears"], one * each["largest"], 2 * swapped)
        lists.append(BlockList(each["name"], length, moved, stays, *sizes))
    rank = fields.count(config, "--network_dim") or _RANK
    moments = moments_of(fields.text(config, "sd.optimizer_type", "--optimizer_type"))
    one_way = bool(fields.flag(config, "block_swap_h2d_only"))
    rest = stay * model["rest"]
    whole = rest + sum(each.length * (each.moved_bytes + each.stays_bytes) for each in lists)
    run = Run(
        label=model["label"],
        weights=weights,
        lists=tuple(lists),
        rest_bytes=rest,
        lora_bytes=(WEIGHT_AND_GRADIENT + moments) * rank * row["lora_per_rank"],
        rank=rank,
        asked=fields.integer(config, "blocks_to_swap") or 0,
        option="--blocks_to_swap",
        beside="",
        smaller="--fp8_base, a lower rank, an 8-bit optimizer",
        times=2,
        is_one_way=one_way,
        is_pinned=bool(fields.flag(config, "use_pinned_memory_for_block_swap")),
        inactive_bytes=whole if fields.text(config, "dit_high_noise") else 0,
        assumptions=tuple(_assumptions(config, moments, model.get("note", ""))),
    )
    ring = (fields.count(config, "block_swap_ring_size") or 2) if one_way else 0
    return BlockSwap(run, row["keeps"], row.get("extra_single", 0), ring, bool(row.get("by_ratio")))


def _length(config: Config, row: dict[str, Any]) -> int | None:
    """Return how many blocks the input gives the model, where the program has an option for it."""
    count = fields.count(config, row["count"]) if "count" in row else None
    if count is not None and not row["keeps"] < count <= _MOST_BLOCKS:
        raise UnusableInput(
            f"a model of {count} blocks",
            expected=f"{row['keeps'] + 1} to {_MOST_BLOCKS}",
            attempt="the model's own number",
        )
    return count


def _precision(config: Config) -> tuple[int, bool, str]:
    """Return the bytes of a weight, whether it has a scale, and the name of its precision.

    Where nothing is said, sd-scripts loads fp32 (`--mixed_precision no`), and musubi-tuner the checkpoint's 16 bits.
    """
    if any(fields.flag(config, name) for name in ("fp8_base", "--fp8_base", "--fp8_base_unet")):
        is_scaled = bool(fields.flag(config, "fp8_scaled"))
        return 1, is_scaled, "scaled fp8" if is_scaled else "fp8"
    if config.framework == "sd-scripts" and fields.text(config, "--mixed_precision") in {None, "no"}:
        return 4, False, "fp32, as --mixed_precision is no"
    return 2, False, "16-bit"


def moments_of(optimizer: str | None) -> int:
    """Return the bytes of an optimizer's states for one parameter, by the optimizer's name; AdamW's without one."""
    name = (optimizer or "adamw").lower()
    if "adafactor" in name:
        return 0  # a row and a column of each matrix
    return _ADAM_8BIT if "8bit" in name or "8_bit" in name else _ADAM


def _assumptions(config: Config, moments: int, note: str) -> Iterator[str]:
    if fields.text(config, "--network_dim") is None:
        yield f"LoRA's rank is {_RANK}, the trainer's default"
    yield f"a LoRA's parameter takes {WEIGHT_AND_GRADIENT + moments} bytes: weight, gradient and moments"
    if config.framework == "sd-scripts" and not fields.flag(config, "--cache_text_encoder_outputs"):
        yield "text encoders are off the GPU, which takes --cache_text_encoder_outputs: the input lacks it"
    else:
        yield "text encoders and VAE are off the GPU, their outputs cached"
    if "lycoris" in (fields.text(config, "--network_module") or ""):
        yield "a LyCORIS adapter is counted as a LoRA of this rank"
    if not fields.flag(config, "gradient_checkpointing"):
        yield "the input lacks --gradient_checkpointing, without which activations take several times as much"
    for key in sorted(_READ & config.unresolved):
        yield f"{key} is set to a value that cannot be read here, so its default counts"
    if note:
        yield note
