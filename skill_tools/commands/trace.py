# SPDX-License-Identifier: Apache-2.0
"""Trace the memory of a step of a Hugging Face model: its own code on tensors without memory, no GPU, no weights.

  offload trace config.json                     the folder of a model does as well, or a profile of it
  offload trace config.json --sequences 4 --tokens 4096 --out profile.json
  offload trace config.json --lora-rank 16      the frozen model with peft's adapters
  offload trace config.json --images 1          with an image in each sequence, of a model that takes images

It prints the peak beyond the weights with and without checkpointing, and the tensors saved for backward. Optimizer
states are not in it: `offload plan` adds them. Exit codes: 0 traced, 2 unusable input, or no torch or transformers, 3 a
fault of this tool.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from skill_tools.commands.verify import reference
from skill_tools.configs.files import check_writable, write_text
from skill_tools.errors import UnusableInput
from skill_tools.planning.model import shape_sources
from skill_tools.reports import measuring
from skill_tools.started import COMMAND

_LONGEST = 200
_BESIDE_TEXT = ("vision", "audio")
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, the batch and the output."""
    parser.add_argument("config", metavar="CONFIG", help="config.json of a model, its folder, or its profile")
    parser.add_argument(
        "--sequences", type=int, default=1, metavar="N", help="sequences in a batch; default: 1"
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, metavar="N", help="tokens of a sequence; default: 2048"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="of the weights; default: bfloat16"
    )
    parser.add_argument(
        "--lora-rank", type=int, metavar="R", help="freeze the model, and train peft's LoRA of this rank"
    )
    parser.add_argument(
        "--images",
        type=int,
        metavar="N",
        help="images in each sequence; default: those of a profile that is traced again, else text alone",
    )
    parser.add_argument("--out", metavar="FILE", help="write the model profile as JSON")
    parser.add_argument("--format", choices=("concise", "json"), default="concise", help="default: concise")


def run(args: argparse.Namespace) -> int:
    """Trace, print and write; raises `UnusableInput` for a model that cannot be traced."""
    given = {"--sequences": args.sequences, "--tokens": args.tokens, "--lora-rank": args.lora_rank or 1}
    for option, value in given.items():
        if not 1 <= value <= 2**20:
            raise UnusableInput(f"{option} {value}", expected="1 to 1048576", attempt=f"{option} 2048")
    if args.images is not None and not 0 <= args.images <= 2**10:
        raise UnusableInput(f"--images {args.images}", expected="0 to 1024", attempt="--images 1")
    if args.out:
        check_writable(args.out)
    with measuring.progress() as on_step:
        profile = _profile(args.config, args.dtype, args.lora_rank, args.images, on_step)
    if args.out:
        write_text(args.out, as_text(profile))
    if args.format == "json":
        print(as_text(profile), end="")
    else:
        print(
            measuring.traced(
                profile, _peaks(profile, args.sequences, args.tokens), args.sequences, args.tokens
            )
        )
    return 0


def as_text(profile: Mapping[str, Any]) -> str:
    """Return a model profile as JSON with one entry a line, and each step's entries on lines of their own."""
    steps = ",\n".join(_object(step) for step in profile["steps"])
    rest = _object({name: value for name, value in profile.items() if name != "steps"})
    return f'{rest[:-2]},\n"steps":[\n{steps}\n]\n}}\n'


def _object(entries: Mapping[str, Any]) -> str:
    lines = (
        f"{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}"


def _profile(
    config: str, dtype: str, lora_rank: int | None, images: int | None, on_step: measuring.OnStep
) -> dict[str, Any]:
    hugging_face = reference("reference_impl.verification.hugging_face")
    trace_profile = reference("reference_impl.verification.trace_profile")
    try:
        entries = hugging_face.read_config(config)
        model = hugging_face.model_from(entries, dtype)
        name = type(model).__name__
        images = hugging_face.images_of(config) if images is None else images
        make_batch = hugging_face.image_batch(entries, images, dtype) if images else hugging_face.text_batch
        if lora_rank:
            model = hugging_face.add_adapters(model, lora_rank)
    except ImportError as error:
        raise UnusableInput(
            f"{error.name or 'transformers'} is not installed",
            expected="the library that has the model's code",
            attempt=f"pip install {error.name or 'transformers'}",
        ) from None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else _first_line(error)
        raise UnusableInput(
            f"{config}: {said}",
            expected="the config.json of a Hugging Face model, or its folder",
            attempt=f"{COMMAND} trace MODEL_FOLDER, whose config.json has the model's class under architectures",
        ) from None
    try:
        # Progress begins where the input is known to be a model: a refusal is one line.
        on_step(f"tracing steps of {name}", 0, 1)
        # A profile asks for twice or three times its length.
        tokens = hugging_face.tokens_to_trace(model, 3 if images else 2)
        document: dict[str, Any] = trace_profile.profile_model(
            model, make_batch, tokens=tokens, images=images
        )
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if implementation:
            document["attention_implementation"] = implementation
        document["config"] = entries
        document["assumptions"] += [
            f"text alone: no {name} is given to the model"
            for name in _BESIDE_TEXT
            if f"{name}_config" in entries and not (images and name == "vision")
        ]
        # A shape describes decoders alone: not vision towers, not layers with a state.
        document |= trace_profile.counted(model)
        if lora_rank:
            document["model"] = f"{name} with LoRA"
    except Exception as error:  # the model's own code runs: it may raise anything
        raise UnusableInput(
            f"{config} cannot be traced: {_first_line(error)}",
            expected="a model whose operations follow from shapes",
            attempt=_instead(entries, config),
        ) from error
    return document


def _instead(entries: dict[str, Any], config: str) -> str:
    """Return the advice for a model that cannot be traced: a formula describes decoders alone."""
    try:
        shape_sources.from_entries(entries, config)
    except UnusableInput:
        return "reference_impl.trace(model, batch, loss) with a batch that your model takes"
    return f"{COMMAND} plan {config}, whose formula is within 8 % of most decoders"


def _first_line(error: Exception) -> str:
    """Return an error's first statement, without its expectation and without long lists."""
    said = (str(error).splitlines() or [type(error).__name__])[0].partition("; expected")[0]
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."


def _peaks(profile: dict[str, Any], sequences: int, tokens: int) -> dict[tuple[bool, bool], tuple[int, str]]:
    module = reference("reference_impl.verification.trace_profile")
    return {
        (checkpointing, freed): module.peak_bytes(
            profile, sequences, tokens, checkpointing=checkpointing, frees_gradients=freed
        )
        for checkpointing in (False, True)
        for freed in (False, True)
    }
