# SPDX-License-Identifier: Apache-2.0
"""How OneTrainer, ai-toolkit and SimpleTuner keep a share of a model on the host while they train a LoRA for it.

- OneTrainer holds whole layers off the GPU and copies them both ways (`LayerOffloadConductor`)
- ai-toolkit draws each Linear with a chance, RamTorch, which SimpleTuner has, takes the first of them: their weights
  stay in pinned memory and come to a ring on the device for forward, recomputation and backward

SimpleTuner's block swap is the answer where the input has it: the last blocks wait on the host, and come to a ring of
two for each list (`MusubiBlockSwapManager`). Before 4.9 backward brought them back and took none away.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.block_swap import AI_TOOLKIT, ONETRAINER, SIMPLETUNER
from skill_tools.dialects.block_swap.on_host import BlockList, BlockSwap, LayerShare, Run
from skill_tools.dialects.block_swap.swapping import WEIGHT_AND_GRADIENT, model_of, moments_of, row_of
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

_BITS = {
    "float_32": 32,
    "tfloat_32": 32,
    "fp32": 32,
    "float": 32,
    "no_change": 16,
    "nfloat_4": 4.5,
    "nf4-bnb": 4.5,
}
_AI_TOOLKIT_SLOTS = 8  # manager_modules.py: PIPELINE_DEPTH 4 for forward and for backward each
_RAMTORCH_SLOTS = 4  # ramtorch/modules/linear.py: two for each
_SWAP_RING = 2  # musubi_block_swap.py: _h2d_ring_size


class _Trainer(NamedTuple):
    """A trainer's keys: the trained part, its rank, optimizer and share, and the share's spelling.

    `trains` has the values of `method` that train a LoRA, None any.
    """

    family: str
    method: str
    trains: frozenset[str] | None
    rank: tuple[str, ...]
    default_rank: int
    optimizer: str
    share: str
    switch: str | None
    option: str
    beside: str
    smaller: str
    checkpointing: str


_TRAINERS = {
    ONETRAINER: _Trainer(
        family="onetrainer.model_type",
        method="onetrainer.training_method",
        trains=frozenset({"LORA"}),
        rank=("lora_rank",),
        default_rank=16,
        optimizer="onetrainer.optimizer",
        share="transformer.offload_fraction",
        switch=None,
        option="transformer.offload_fraction",
        beside="",
        smaller="transformer.weight_dtype FLOAT_8 or NFLOAT_4, a lower lora_rank, an 8-bit optimizer",
        checkpointing="transformer.gradient_checkpointing",
    ),
    AI_TOOLKIT: _Trainer(
        family="aitk.arch",
        method="network.type",
        trains=None,
        rank=("network.linear", "network.rank"),
        default_rank=4,
        optimizer="train.optimizer",
        share="aitk.layer_offloading_transformer_percent",
        switch="aitk.layer_offloading",
        option="model.layer_offloading_transformer_percent",
        beside=" with model.layer_offloading true",
        smaller="model.quantize true, a lower network.linear, an 8-bit optimizer",
        checkpointing="aitk.gradient_checkpointing",
    ),
    SIMPLETUNER: _Trainer(
        family="simpletuner.model_family",
        method="simpletuner.model_type",
        trains=frozenset({"lora"}),
        rank=("--lora_rank",),
        default_rank=16,
        optimizer="simpletuner.optimizer",
        share="simpletuner.ramtorch_transformer_percent",
        switch="simpletuner.ramtorch",
        option="ramtorch_transformer_percent",
        beside=" with ramtorch true",
        smaller="base_model_precision int8-quanto, a lower lora_rank, an 8-bit optimizer",
        checkpointing="simpletuner.gradient_checkpointing",
    ),
}


def of_config(config: Config) -> LayerShare | BlockSwap:
    """Return the weights of the run in `config`; raises `UnusableInput` for an uncounted model."""
    trainer = _TRAINERS[config.framework]
    family = fields.text(config, trainer.family) or ""
    method = fields.text(config, trainer.method)
    is_lora = (
        method in trainer.trains if trainer.trains is not None else config.value("aitk.network") is not None
    )
    row = row_of(config, family) if is_lora else None
    if row is None:
        families = ", ".join(knowledge.index()["block_swap"]["programs"][config.framework])
        trained = family or "a family that the input does not name"
        whole = f"only a LoRA is counted, not {method or 'a whole model'}"
        raise UnusableInput(
            f"the sizes of {trained} are not counted" if is_lora else whole,
            expected=f"a LoRA of one of {families}{_left_out(config)}",
            attempt=f"{COMMAND} plan with one of these",
        )
    bits, weights = _precision(config)
    stay = 4 if bits == 32 else 2
    model = model_of(row)
    experts = row.get("experts", 1)
    lists = tuple(
        BlockList(
            name=each["name"],
            length=each["count"] * experts,
            moved_bytes=round(each["swapped"] * bits / 8),
            stays_bytes=stay * (each["parameters"] - each["swapped"]),
            linears=each["linears"],
            largest_bytes=round(each["largest"] * bits / 8),
            wide_bytes=2 * each["swapped"],
        )
        for each in model["lists"]
    )
    rank = fields.count(config, *trainer.rank) or trainer.default_rank
    one_parameter = WEIGHT_AND_GRADIENT + moments_of(fields.text(config, trainer.optimizer))
    run = Run(
        label=model["label"] + (", both experts" if experts > 1 else ""),
        weights=weights,
        lists=lists,
        rest_bytes=stay * model["rest"] * experts,
        lora_bytes=one_parameter * rank * row["lora_per_rank"],
        rank=rank,
        asked=_asked(config, trainer),
        option=trainer.option,
        beside=trainer.beside,
        smaller=trainer.smaller,
        times=2 if config.framework == ONETRAINER else 3,
        is_one_way=config.framework != ONETRAINER,
        is_pinned=True,
        inactive_bytes=0,
        assumptions=tuple(_assumptions(config, trainer, one_parameter, model.get("note", ""))),
    )
    moved = stay * row.get("rest_moved", 0 if config.framework == ONETRAINER else model["rest"]) * experts
    if config.framework == ONETRAINER:
        return LayerShare(run, moved, "share", whole_layers=True)
    if config.framework == AI_TOOLKIT:
        return LayerShare(run, moved, "share", slots=_AI_TOOLKIT_SLOTS)
    if not config.value("simpletuner.ramtorch") and run.asked:
        swapped = run._replace(option="musubi_blocks_to_swap", beside="", times=2)
        return BlockSwap(swapped, keeps=1, ring=_SWAP_RING, from_the_end=True)
    return LayerShare(run, moved, "percent", slots=_RAMTORCH_SLOTS, in_order=True)


def _left_out(config: Config) -> str:
    if config.framework == AI_TOOLKIT:
        return "; FLUX.1, SD3 and SDXL keep their layers on the GPU"
    return ""


def _precision(config: Config) -> tuple[float, str]:
    """Return the bits of a Linear weight, and the name of its precision."""
    name = _named_precision(config)
    if name.startswith("gguf"):
        raise UnusableInput(
            "the size of GGUF weights is that of their file",
            expected="a weight type of one size",
            attempt="transformer.weight_dtype FLOAT_8, for about as much",
        )
    if name in _BITS:
        return _BITS[name], "16-bit" if name == "no_change" else name
    found = re.search(r"\d+", name)
    return (int(found[0]) if found else 16), name


def _named_precision(config: Config) -> str:
    if config.framework == ONETRAINER:
        name = fields.text(config, "transformer.weight_dtype")
        return "float_32" if name in {None, "NONE"} else str(name).lower()
    if config.framework == AI_TOOLKIT:
        if config.value("model.quantize"):
            return (fields.text(config, "model.qtype") or "float8").partition("|")[0].lower()
        return (fields.text(config, "train.dtype") or "fp32").lower()
    return (fields.text(config, "simpletuner.base_model_precision") or "no_change").lower()


def _asked(config: Config, trainer: _Trainer) -> float:
    """Return the share moved by the input: all of it if it is switched on without a share."""
    share = fields.number(config, trainer.share)
    if trainer.switch is None:
        return share or 0.0
    if not config.value(trainer.switch):
        return float(fields.integer(config, "simpletuner.musubi_blocks_to_swap") or 0)
    return share if share is not None else {AI_TOOLKIT: 1.0, SIMPLETUNER: 100.0}[config.framework]


def _assumptions(config: Config, trainer: _Trainer, one_parameter: int, note: str) -> Iterator[str]:
    if fields.text(config, *trainer.rank) is None:
        yield f"LoRA's rank is {trainer.default_rank}, the trainer's default"
    yield f"a LoRA's parameter takes {one_parameter} bytes: weight, gradient and moments"
    if config.framework == AI_TOOLKIT:
        yield "each Linear leaves with this chance, so that a run may keep a few percent more or less"
    if fields.text(config, "--lora_type") == "lycoris":
        yield "a LyCORIS adapter is counted as a LoRA of this rank"
    if config.value("simpletuner.enable_group_offload"):
        yield "enable_group_offload, which SimpleTuner has before 4.9 alone, is not counted"
    yield "text encoders and VAE are off the GPU, their outputs cached"
    if config.value(trainer.checkpointing) is False:
        yield "the input turns gradient checkpointing off, without which activations take several times as much"
    if note:
        yield note
