# SPDX-License-Identifier: Apache-2.0
"""Asks Unsloth: the checks of its two calls, in their order, and the one of the trainer, each as it stands there.

A load by FastLanguageModel is FastLlamaModel's, or FastBaseModel's where it trains the whole model or in 8 bits. Of
both the statements that refuse swapped layers are run, with the call's arguments and a machine with a GPU.
"""

import ast
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from source_parts import Sources

NAME = "unsloth"
RELEASES = ("2026.10.9",)
WHEEL = "unsloth"
FILENAME = "train.py"
# Facts that nothing states: the kind of checkpointing, and that a present swap stays.
NOT_JUDGED = {"us-checkpointing-short", "us-layers-twice"}
ALSO_JUDGED = {"us-layers-sharded", "us-states-deepspeed"}  # about a Trainer, whose script it is
PRINTED = {"us-load-auto-falls-back", "us-embedding-inference", "us-states-deepspeed"}
_UTILS, _STATES = "unsloth.models._utils", "unsloth.optimizers.state_offload"
_SWITCH = "UNSLOTH_OFFLOAD_OPTIMIZER_STATE"
_CLASSES = {"unsloth.models.llama": "FastLlamaModel", "unsloth.models.vision": "FastBaseModel"}


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        gpu = MagicMock(name="torch")
        gpu.cuda.is_available.return_value = True
        given = {f"{_UTILS}.torch": gpu, f"{_UTILS}.is_integrated_unified_memory_gpu": lambda: False}
        given[f"{_UTILS}._attach_block_swap"] = lambda model, layers, depth: SimpleNamespace(
            indices=range(layers)
        )
        given[f"{_UTILS}._ignore_block_swap_params_for_ddp"] = lambda _: []  # of a run that nobody shards
        given[f"{_UTILS}._auto_block_swap_indices"] = lambda *_: 0  # a GPU that holds every layer
        sources = Sources(folder, given=given)
        self._take = lambda name: sources.take(_UTILS, name)
        self._install = sources.take(_STATES, "install_optimizer_state_offload")
        self._loads = {owner: _checks(sources, module, owner) for module, owner in _CLASSES.items()}

    def ask(self, load: dict[str, Any], peft: dict[str, Any] | None, engine: str, switch: str) -> None:
        """Load, add adapters, begin to train; raise the release's error."""
        whole = bool(load.get("full_finetuning") or load.get("load_in_8bit"))
        swapped = self._load(self._loads["FastBaseModel" if whole else "FastLlamaModel"], dict(load))
        model = SimpleNamespace(vllm_engine=object() if load.get("fast_inference") else None)
        if swapped and swapped != "auto":
            model._unsloth_block_swap = SimpleNamespace(indices=range(swapped))
        if peft is not None:
            self._adapt(model, dict(peft), trains_all=bool(load.get("full_finetuning")))
        trainer = SimpleNamespace(
            model=model,
            is_fsdp_enabled=engine == "fsdp",
            is_deepspeed_enabled=engine == "deepspeed",
            create_scheduler=print,
        )
        self._take("_block_swap_for_trainer_backend")(trainer)
        with patch.dict(os.environ, {_SWITCH: switch}):
            self._install(trainer)

    def _load(self, checks: list[ast.stmt], kwargs: dict[str, Any]) -> Any:
        names: dict[str, Any] = {
            **{name: kwargs.pop(name, False) for name in ("fast_inference", "full_finetuning", "load_in_8bit")},
            "kwargs": kwargs, "num_labels": None, "_ckpt_quant_method": None, "load_layers_to_host": print,
            "torch": MagicMock(), "is_integrated_unified_memory_gpu": lambda: False, "OFFLOAD_EMBEDDING_AUTO": "auto",
            "device_map": None, "block_swap_load_device": lambda _: 0,
        }  # fmt: skip
        for name in ("legacy_offload_layers", "refuse_block_swap_load"):
            names[name] = self._take(name)
        names["offload_embedding"] = kwargs.pop("offload_embedding", "auto")
        exec(compile(ast.Module(checks, []), "from_pretrained", "exec"), names)
        return names.get("offload_layers", names.get("_offload_layers"))

    def _adapt(self, model: Any, kwargs: dict[str, Any], *, trains_all: bool) -> None:
        layers = self._take("legacy_offload_layers")(kwargs, kwargs.pop("offload_layers", None))
        depth = self._take("prefetch_depth_arg")(kwargs)
        checkpointing = kwargs.get("use_gradient_checkpointing", "unsloth")
        if trains_all:  # which has no adapters, so that the call has no effect
            return
        made = self._take("install_block_swap")(
            model, layers, prefetch_depth=depth, use_gradient_checkpointing=checkpointing
        )
        if made is not None:
            model._unsloth_block_swap = made


def _checks(sources: Sources, module: str, owner: str) -> list[ast.stmt]:
    """Return the statements of a class's load that are about swapped layers or the embedding and nothing later."""
    path = sources.path(module)
    assert path is not None
    (load,) = (
        node
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef) and each.name == owner
        for node in each.body
        if isinstance(node, ast.FunctionDef) and node.name == "from_pretrained"
    )
    kept = [
        node
        for node in ast.walk(load)
        if (isinstance(node, ast.If) and "refuse_block_swap_load" in ast.unparse(node.body[0]))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "offload_embedding and fast_inference")
        or (isinstance(node, ast.Assign) and "legacy_offload_layers(kwargs" in ast.unparse(node.value))
    ]
    outer = [
        node for node in kept if not any(node is not other and node in ast.walk(other) for other in kept)
    ]
    return sorted(outer, key=lambda node: node.lineno)


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any], dict[str, Any] | None, str, str]:
    """Return the arguments of both calls, the way to shard, and the variable's value."""
    share = chance.choice([0.1, 0.3, 0.6])
    numbers = [0, 4, 8, "auto", None, False, True, -1, 0.5, "all", 3]

    def some(**values: list[Any]) -> dict[str, Any]:
        return {name: chance.choice(each) for name, each in values.items() if chance.random() < share}

    layers = numbers if chance.random() < 0.3 else numbers[:6]
    switches = [True, False]
    load = some(
        offload_layers=layers, block_swap_layers=layers[:3], fast_inference=switches, full_finetuning=switches,
        load_in_8bit=switches, offload_embedding=[True, False, "auto"], max_seq_length=[256, 2048],
    )  # fmt: skip
    peft = some(
        offload_layers=layers, block_swap_layers=layers[:3], use_gradient_checkpointing=["unsloth", True, False, None],
        prefetch_depth=[1, 2, "auto", 0, -1, True, "x"],
    )  # fmt: skip
    engine, switch = (
        chance.choice(["", "", "fsdp", "deepspeed"]),
        chance.choice(["0", "1", "on", "yes", "true", "2", "no"]),
    )
    return load, peft if chance.random() < 0.85 else None, engine, switch


def command(load: dict[str, Any], peft: dict[str, Any] | None, engine: str, switch: str) -> str:
    """Return the script that lint reads."""

    def given(values: dict[str, Any]) -> str:
        return "".join(f", {name}={value!r}" for name, value in values.items())

    shards = {"fsdp": ", fsdp='full_shard'", "deepspeed": ", deepspeed='zero2.json'"}.get(engine, "")
    lines = [
        "from trl import SFTConfig, SFTTrainer",
        f"import os\nos.environ[{_SWITCH!r}] = {switch!r}",
        "from unsloth import FastLanguageModel",
        f"model, tokenizer = FastLanguageModel.from_pretrained('a/b'{given(load)})",
        f"model = FastLanguageModel.get_peft_model(model, r=16{given(peft)})" if peft is not None else "",
        f"SFTTrainer(model=model, args=SFTConfig(output_dir='out'{shards})).train()",
    ]
    return "\n".join(lines)
