# SPDX-License-Identifier: Apache-2.0
"""How a program swaps the blocks of the model that it trains a LoRA for: `knowledge/block_swap.yaml`, read for one run.

Both trainers keep exactly the blocks on the GPU that do not swap: a block that comes takes the storage of the one that
leaves (`custom_offloading_utils.py::ModelOffloader`). musubi-tuner's `--block_swap_h2d_only` has a ring of buffers
beside them, for each list of blocks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

_RANK = 4  # of both trainers, where --network_dim is not given
_WEIGHT_AND_GRADIENT = 8  # bytes of a LoRA's parameter, both fp32
_ADAM, _ADAM_8BIT = 8, 2  # bytes of the moments of one parameter
_READ = frozenset(
    {"--network_dim", "blocks_to_swap", "block_swap_ring_size", "musubi.num_layers", "musubi.task"}
)
_MOST_BLOCKS = 1000
_SCALED = 64  # weights of scaled fp8 that share one bf16 scale


class BlockList(NamedTuple):
    """A list of `length` equal blocks, sizes in bytes of one: `moved` leaves the GPU as it swaps, `stays` does not."""

    name: str
    length: int
    moved_bytes: int
    stays_bytes: int


class BlockSwap(NamedTuple):
    """A run's blocks. `keeps` of each list stay on the GPU.

    `extra_single` is what the program adds to the single blocks, `asked` how many blocks the input swaps, and `ring`
    the buffers for moved blocks that each list has on the GPU. `is_one_way` says that no block is copied back.
    `inactive_bytes` are those of Wan 2.2's other expert, which waits on the host.
    """

    label: str
    weights: str
    lists: tuple[BlockList, ...]
    rest_bytes: int
    lora_bytes: int
    rank: int
    keeps: int
    extra_single: int
    asked: int
    ring: int
    is_one_way: bool
    is_pinned: bool
    inactive_bytes: int
    assumptions: tuple[str, ...]

    def split(self, blocks: int) -> tuple[int, ...]:
        """Return how many of each list swap for `--blocks_to_swap blocks`: half double, the rest two single each."""
        if len(self.lists) == 1 or not blocks:
            return (blocks,) * len(self.lists)
        double = blocks // 2
        return double, 2 * (blocks - double) + self.extra_single

    @property
    def most(self) -> int:
        """The largest `--blocks_to_swap` that is allowed."""
        return max(n for n in range(sum(each.length for each in self.lists)) if self.is_allowed(n))

    def is_allowed(self, blocks: int) -> bool:
        """Return whether the program's own assertion lets `--blocks_to_swap blocks` pass."""
        parts = zip(self.lists, self.split(blocks), strict=True)
        return not blocks or all(swapped <= each.length - self.keeps for each, swapped in parts)


def assumed_activations_bytes() -> int:
    """Return the bytes that activations are given where nobody says what they take."""
    found: int = knowledge.index()["block_swap"]["activations"]["bytes"]
    return found


def of_config(config: Config) -> BlockSwap:
    """Return the blocks of the run in `config`; raises `UnusableInput` for a program whose blocks nobody counted."""
    data = knowledge.index()["block_swap"]
    program = fields.text(config, f"{config.framework.partition('-')[0]}.program") or ""
    programs = data["programs"][config.framework]
    row = next((each for each in programs.get(program, ()) if _is_about(each, config)), None)
    if row is None or fields.text(config, "--model_type") == "chroma":
        raise UnusableInput(
            f"the blocks of {program or 'a program that the input does not name'} are not counted for this model",
            expected=f"a LoRA by one of {', '.join(programs)} (of SD3 a checkpoint called large)",
            attempt=f"{COMMAND} plan with a script of one of these",
        )
    return _built(config, row, data["models"][row["model"]])


def _is_about(row: dict[str, Any], config: Config) -> bool:
    value = (fields.text(config, row["option"]) or "").lower() if "option" in row else ""
    return "words" not in row or any(word in value for word in row["words"])


def _built(config: Config, row: dict[str, Any], model: dict[str, Any]) -> BlockSwap:
    one, is_scaled, weights = _precision(config)
    stay = 1 if one == 1 and not is_scaled else max(one, 2)
    lists = []
    for each in model["lists"]:
        wide = row.get("bf16", {}).get(each["name"], 0) if is_scaled else 0
        scales = 2 * (each["swapped"] - wide) // _SCALED if is_scaled else 0
        moved = one * (each["swapped"] - wide) + 2 * wide
        stays = stay * (each["parameters"] - each["swapped"]) + scales
        lists.append(BlockList(each["name"], _length(config, row) or each["count"], moved, stays))
    rank = fields.count(config, "--network_dim") or _RANK
    moments = _moments(config)
    one_way = bool(fields.flag(config, "block_swap_h2d_only"))
    rest = stay * model["rest"]
    whole = rest + sum(each.length * (each.moved_bytes + each.stays_bytes) for each in lists)
    return BlockSwap(
        label=model["label"],
        weights=weights,
        lists=tuple(lists),
        rest_bytes=rest,
        lora_bytes=(_WEIGHT_AND_GRADIENT + moments) * rank * row["lora_per_rank"],
        rank=rank,
        keeps=row["keeps"],
        extra_single=row.get("extra_single", 0),
        asked=fields.integer(config, "blocks_to_swap") or 0,
        ring=(fields.count(config, "block_swap_ring_size") or 2) if one_way else 0,
        is_one_way=one_way,
        is_pinned=bool(fields.flag(config, "use_pinned_memory_for_block_swap")),
        inactive_bytes=whole if fields.text(config, "dit_high_noise") else 0,
        assumptions=tuple(_assumptions(config, moments, model.get("note", ""))),
    )


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


def _moments(config: Config) -> int:
    optimizer = (fields.text(config, "sd.optimizer_type", "--optimizer_type") or "adamw").lower()
    if "adafactor" in optimizer:
        return 0  # a row and a column of each matrix
    return _ADAM_8BIT if "8bit" in optimizer else _ADAM


def _assumptions(config: Config, moments: int, note: str) -> Iterator[str]:
    if fields.text(config, "--network_dim") is None:
        yield f"LoRA's rank is {_RANK}, the trainer's default"
    yield f"a LoRA's parameter takes {_WEIGHT_AND_GRADIENT + moments} bytes: weight, gradient and moments"
    if config.framework == "sd-scripts" and not fields.flag(config, "--cache_text_encoder_outputs"):
        yield "text encoders are off the GPU, which takes --cache_text_encoder_outputs: the input lacks it"
    else:
        yield "text encoders and VAE are off the GPU, their outputs cached"
    if not fields.flag(config, "gradient_checkpointing"):
        yield "the input lacks --gradient_checkpointing, without which activations take several times as much"
    for key in sorted(_READ & config.unresolved):
        yield f"{key} is set to what cannot be read here, so that its default counts"
    if note:
        yield note
