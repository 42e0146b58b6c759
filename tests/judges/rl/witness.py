# SPDX-License-Identifier: Apache-2.0
"""Asks one release of an RL framework: questions as JSON lines, answered with the errors and warnings that it gives.

    python tests/judges/rl/witness.py NAME FOLDER < questions > answers

It runs in a process of its own, with the libraries of `fetch.py` alone. The checks are the framework's own code: Hydra
over verl's configurations and the classes of its engine, prime-rl's pydantic classes, and NeMo-RL's and ms-swift's
functions, taken out of their modules because those import a training stack.
"""

import ast
import copy
import importlib
import json
import logging
import math
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Optional

Question = dict[str, Any]
Answer = dict[str, list[str]]
Ask = Callable[[Question], None]
WARNINGS: list[str] = []


def main() -> None:
    """Answer every question of standard input."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    ask = {"verl": verl, "nemo_rl": nemo_rl, "ms_swift": ms_swift, "prime_rl": prime_rl}[name](folder)
    for line in sys.stdin:
        print(json.dumps(answered(ask, json.loads(line))), flush=True)


def answered(ask: Ask, question: Question) -> Answer:
    """Return the framework's answer; its first error hides the others."""
    WARNINGS.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ask(question)
            errors = []
        except Exception as error:  # whatever a framework raises is an answer
            errors = [str(error)]
    return {"errors": errors, "warnings": [*WARNINGS, *(str(each.message) for each in caught)]}


def taken_out(path: Path, names: Iterable[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Run the definitions called `names` of a module, wherever they stand in it, in `scope`."""
    wanted = list(names)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in wanted
    ]
    exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)
    return scope


def verl(folder: Path) -> Ask:
    from hydra import compose, initialize_config_dir
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf, open_dict

    class BaseConfig:
        _mutable_fields: ClassVar[set[str]] = set()

    scope = taken_out(
        folder / "verl/workers/config/engine.py",
        ("EngineRouterReplayConfig", "EngineConfig", "QATEngineConfig", "FSDPEngineConfig", "VeOmniEngineConfig"),
        {"BaseConfig": BaseConfig, "dataclass": dataclass, "field": field, "Any": Any, "Optional": Optional,
         "Literal": Literal, "Callable": Callable, "math": math, "logger": logging.getLogger("verl")},
    )  # fmt: skip
    parser, bases = OverridesParser.create(), {}

    def base(name: str) -> Any:
        if name not in bases:
            with initialize_config_dir(str((folder / "verl/trainer/config").resolve()), version_base=None):
                bases[name] = compose(name)
            with open_dict(bases[name]):
                for section in set(bases[name]) - {"actor_rollout_ref", "critic", "algorithm", "trainer"}:
                    del bases[name][section]
                bases[name].actor_rollout_ref.pop("rollout")
            OmegaConf.set_struct(bases[name], True)
        return copy.deepcopy(bases[name])

    def ask(question: Question) -> None:
        config = base(question["name"])
        ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides(question["overrides"]), config)
        root = OmegaConf.to_container(config, resolve=False)
        actor = root["actor_rollout_ref"]["actor"]
        for section, engine in (("fsdp_config", "FSDPEngineConfig"), ("veomni", "VeOmniEngineConfig")):
            if isinstance(actor.get(section), dict) and engine in scope:
                known = {each.name for each in fields(scope[engine])}
                values = {key: value for key, value in actor[section].items() if key in known}
                scope[engine](**{key: value for key, value in values.items() if "${" not in str(value)})

    return ask


def nemo_rl(folder: Path) -> Ask:
    class Backends(dict[str, str]):
        __members__: Mapping[str, str] = {}

    scope = taken_out(
        folder / "nemo_rl/models/megatron/setup.py",
        ("_apply_performance_config", "_validate_optimizer_config"),
        {"Any": Any, "PolicyConfig": dict, "os": os, "AttnBackend": Backends(), "InferenceCudaGraphScope": {},
         "_NEMOTRON_OMNI_EXPANDED_SEQUENCE_CONTRACT": "", "set_cuda_graph_modules": lambda *_: None},
    )  # fmt: skip

    def ask(question: Question) -> None:
        policy = question["policy"]
        experts = policy["megatron_cfg"].get("model_overrides", {}).get("num_moe_experts")
        model = types.SimpleNamespace(num_moe_experts=experts, gated_linear_unit=True)
        scope["_apply_performance_config"](model, policy)
        scope["_validate_optimizer_config"](policy)

    return ask


def ms_swift(folder: Path) -> Ask:
    path = next(
        each for each in folder.rglob("*_args.py") if "_check_fsdp2_compatibility" in each.read_text("utf-8")
    )
    logger = types.SimpleNamespace(
        warning=WARNINGS.append, warn=WARNINGS.append, info=lambda *_: None, info_once=lambda *_: None
    )
    state = {"is_mp": False}
    scope = taken_out(
        path,
        ("_init_deepspeed", "_init_fsdp", "_check_fsdp2_compatibility"),
        {"os": os, "logger": logger, "is_mp": lambda: state["is_mp"], "get_device_count": lambda: 2,
         "require_version": lambda *_: None, "enable_fsdp_ram_efficient_loading": lambda: None,
         "json_parse_to_dict": parsed, "__file__": str(path)},
    )  # fmt: skip

    def ask(question: Question) -> None:
        arguments = types.SimpleNamespace(
            **{"deepspeed": None, "fsdp": None, "save_only_model": False, "gradient_checkpointing": True,
               "use_ray": False, "local_world_size": 1, "zero_hpz_partition_size": None,
               "deepspeed_autotp_size": None, "callbacks": [], **question["arguments"]}
        )  # fmt: skip
        arguments._check_fsdp2_compatibility = lambda: scope["_check_fsdp2_compatibility"](arguments)
        state["is_mp"] = question["is_mp"]
        scope["_init_deepspeed"](arguments)
        scope["_init_fsdp"](arguments)

    return ask


def parsed(value: object) -> object:
    """Return JSON, or the content of the file of that name, as ms-swift's own helper does."""
    if not isinstance(value, str) or not value:
        return value
    return json.loads(Path(value).read_text(encoding="utf-8") if Path(value).is_file() else value)


def prime_rl(folder: Path) -> Ask:
    sources = next(
        each for each in (folder / "packages/prime-rl-configs/src", folder / "src") if each.is_dir()
    )
    sys.path.insert(0, str(sources))
    trainer = importlib.import_module("prime_rl.configs.trainer")
    return lambda question: trainer.TrainerConfig.model_validate(question["trainer"])


if __name__ == "__main__":
    main()
