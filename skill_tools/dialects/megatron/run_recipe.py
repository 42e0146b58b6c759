# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of Megatron Bridge's launch programs: dotted overrides, and options that stand for them.

The options are those of `scripts/training/run_recipe.py` and of the performance scripts (`-ol` for offloaded
layers among them). An option that sets no configuration is passed over.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from skill_tools.configs.config import Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.hydra import looks_like_override, parse_value
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.source import load
from skill_tools.configs.tree import single_document
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import OMEGACONF
from skill_tools.dialects.megatron.bridge_inputs import Overrides, write_file, write_section
from skill_tools.errors import UnusableInput

_FIELDS = {
    "-tp": ("model.tensor_model_parallel_size",),
    "-pp": ("model.pipeline_model_parallel_size",),
    "-cp": ("model.context_parallel_size",),
    "-vp": ("model.virtual_pipeline_model_parallel_size",),
    "-ep": ("model.expert_model_parallel_size",),
    "-et": ("model.expert_tensor_parallel_size",),
    "-etp": ("model.expert_tensor_parallel_size",),
    "-gb": ("train.global_batch_size",),
    "-mb": ("train.micro_batch_size",),
    "-ms": ("train.train_iters",),
    "-sl": ("dataset.seq_length", "model.seq_length"),
    "-rl": ("model.recompute_num_layers",),
    "-ol": ("model.cpu_offloading_num_layers",),
    "--tensor_model_parallel_size": ("model.tensor_model_parallel_size",),
    "--pipeline_model_parallel_size": ("model.pipeline_model_parallel_size",),
    "--context_parallel_size": ("model.context_parallel_size",),
    "--virtual_pipeline_model_parallel_size": ("model.virtual_pipeline_model_parallel_size",),
    "--expert_model_parallel_size": ("model.expert_model_parallel_size",),
    "--expert_tensor_parallel_size": ("model.expert_tensor_parallel_size",),
    "--global_batch_size": ("train.global_batch_size",),
    "--micro_batch_size": ("train.micro_batch_size",),
    "--max_steps": ("train.train_iters",),
    "--seq_length": ("dataset.seq_length", "model.seq_length"),
    "--recompute_num_layers": ("model.recompute_num_layers",),
    "--activation_offload_layers": ("model.cpu_offloading_num_layers",),
    "--recompute_modules": ("model.recompute_modules",),
    "--cuda_graph_impl": ("model.cuda_graph_impl",),
    "--cuda_graph_scope": ("model.cuda_graph_scope",),
    "--use_megatron_fsdp": ("ddp.use_megatron_fsdp",),
    "--nccl_ub": ("ddp.nccl_ub",),
    "--moe_a2a_overlap": (
        "comm_overlap.overlap_moe_expert_parallel_comm",
        "comm_overlap.delay_wgrad_compute",
    ),
    "--num_layers": ("model.num_layers",),
    "--hidden_size": ("model.hidden_size",),
    "--num_moe_experts": ("model.num_moe_experts",),
    "--lr": ("optimizer.lr",),
    "--min_lr": ("optimizer.min_lr",),
    "--save_dir": ("checkpoint.save",),
    "--load_dir": ("checkpoint.load",),
    "--save_interval": ("checkpoint.save_interval",),
    "--pretrained_checkpoint": ("checkpoint.pretrained_checkpoint",),
}
_LISTS = ("model.recompute_modules", "model.cuda_graph_scope")
_IMPLIED: Mapping[str, Mapping[str, object]] = {
    "model.recompute_num_layers": {"model.recompute_granularity": "full", "model.recompute_method": "block"},
    "model.recompute_modules": {"model.recompute_granularity": "selective"},
    "model.cpu_offloading_num_layers": {"model.cpu_offloading": True, "model.cpu_offloading_weights": False},
}
_CONFIG_FILES = ("--config-file", "--config_file")
_RECIPES = ("--recipe", "--model", "-mr", "--model_recipe_name", "--use_recipes")


def write_arguments(draft: Draft, words: Sequence[Argument], file: str, folder: Path | None) -> None:
    """Write the input of a launch program: its configuration file first, then the rest in order."""
    options = list(_options(words))
    for option, value in options:
        if option.text in _CONFIG_FILES and value is not None:
            _write_config_file(draft, value, folder)
        elif option.text in _RECIPES and value is not None and value.resolved:
            draft.model_name = value.text
    overrides = Overrides(draft)
    for option, value in options:
        place = Place(file, option.line, option.column)
        if option.text in _FIELDS:
            _write_option(draft, option, value, place)
        elif looks_like_override(option.text) and _names_section(draft, option.text):
            _write_override(draft, overrides, option, place)
        elif "." in option.text and draft.accepts(option.text.lstrip("-")) and option.certain:
            overrides.refuse(f"{option.text}: an override has no dashes and a value, as model.x=true", place)


def _options(words: Sequence[Argument]) -> Iterator[tuple[Argument, Argument | None]]:
    """Yield each option with the word after it, if that is its value; `--x=y` is split."""
    for position, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if word.text.startswith("-") and equals:
            yield word._replace(text=name), word._replace(text=value)
        else:
            following = words[position + 1] if position + 1 < len(words) else None
            has_value = following is not None and not following.text.startswith("-")
            yield word, following if has_value else None


def _names_section(draft: Draft, text: str) -> bool:
    """Return whether an override is for a configuration: `A=1` before a program is not."""
    key = text.lstrip("+~").partition("=")[0]
    return "." in key or draft.accepts(key)


def _write_override(draft: Draft, overrides: Overrides, word: Argument, place: Place) -> None:
    """Write an override; if only the running script completes it, its key stays open."""
    if word.resolved and word.certain:
        try:
            overrides.write(word.text, place)
        except UnusableInput as error:
            overrides.refuse_form(word.text, error.expected, place)
        return
    spelling = word.text.lstrip("+~").partition("=")[0]
    if draft.accepts(spelling):
        draft.set(spelling, UNREADABLE, place)


def _write_option(draft: Draft, option: Argument, argument: Argument | None, place: Place) -> None:
    """Write the settings that an option stands for; offloading no layers stands for nothing."""
    known = option.certain and argument is not None and argument.resolved and argument.certain
    value = parse_value(argument.text.replace(",", " ")) if known and argument else UNREADABLE
    fields = _FIELDS[option.text]
    if fields == ("model.cpu_offloading_num_layers",):
        draft.set_key("activation_offload_layers", value, option.text, place)
        if isinstance(value, int) and value <= 0:
            return
    for field in fields:
        is_text_of_list = field in _LISTS and isinstance(value, str)
        write_section(draft, field, str(value).split() if is_text_of_list else value, option.text, place)
        for implied, implied_value in _IMPLIED.get(field, {}).items():
            known_value = implied_value if value is not UNREADABLE else UNREADABLE
            write_section(draft, implied, known_value, option.text, place)


def _write_config_file(draft: Draft, argument: Argument, folder: Path | None) -> None:
    if not argument.resolved:
        return
    for place in [folder, Path()] if folder else [Path()]:
        path = place / argument.text
        if path.is_file():
            source = load(path)
            draft.sources[source.name] = source.text
            write_file(draft, single_document(source, OMEGACONF, draft=draft), source.name)
            return
