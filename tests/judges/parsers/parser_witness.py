# SPDX-License-Identifier: Apache-2.0
"""Asks a framework's own parser: a process that answers one question in JSON a line with one answer (`parser_answers`).

    python parser_witness.py PARSER FOLDER..

PARSER is a function of this module; the folders hold the release that is asked, and come first on the path.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from dotted_names import values_at
from hf_arguments import NAMES
from parser_answers import Answer, encoded


def yaml_safe(question: dict[str, Any]) -> Any:
    """PyYAML's safe loader."""
    import yaml

    return mapping(yaml.safe_load(question["text"]))


def omegaconf(question: dict[str, Any]) -> Any:
    """OmegaConf, from a file."""
    from omegaconf import OmegaConf

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8", newline="") as file:
        file.write(question["text"])
        file.flush()
        loaded = mapping(OmegaConf.to_container(OmegaConf.load(file.name)))
    if list(loaded.values()) == [None] and not question["text"].lstrip().startswith("{"):
        require_no_text(question["text"], *loaded)
    return loaded


def require_no_text(text: str, name: object) -> None:
    """Raise for a file of one text: OmegaConf makes it a key without a value, and no configuration is meant."""
    if text.strip().startswith(str(name)) and f"{name}:" not in text:
        raise TypeError("text")


def json_loads(question: dict[str, Any]) -> Any:
    """Python's own JSON, as transformers, Accelerate and ms-swift read a DeepSpeed file."""
    return mapping(json.loads(question["text"]))


def axolotl(question: dict[str, Any]) -> Any:
    """Axolotl's `load_cfg` on a file and the options of `axolotl train`, up to where it validates the result.

    Click parses the options by the release's own table of them, its own function builds the launcher's command, and
    Fire reads that; `left` goes to the launcher.
    """
    import axolotl_command

    return axolotl_command.run(question["text"], question["words"], launcher=question["launcher"])


def hydra(question: dict[str, Any]) -> Any:
    """Hydra's own grammar: sign, key and value of an override that is no sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType

    override = OverridesParser.create().parse_override(question["text"])
    if override.is_sweep_override():
        raise ValueError("a sweep")
    signs = {
        OverrideType.CHANGE: "",
        OverrideType.ADD: "+",
        OverrideType.FORCE_ADD: "++",
        OverrideType.DEL: "~",
    }
    return [signs[override.type], override.key_or_group, override.value()]


def deepspeed(question: dict[str, Any]) -> Any:
    """DeepSpeed's `DeepSpeedConfig` on a file, for one rank on a CPU: the values that its classes hold."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig(_written({"text": question["text"], "suffix": ".json"}))
    classes = {
        "zero_optimization": config.zero_config,
        "compile": config.compile_config,
        "bf16": config.bfloat16_config,
        "fp16": config.float16_config,
    }
    tree = {
        section: {**held.model_dump(), **held.model_dump(by_alias=True)} for section, held in classes.items()
    }
    held = values_at(tree, question["names"])
    return {name: getattr(value, "value", value) for name, value in held.items()}


def nemo_rl(question: dict[str, Any]) -> Any:
    """NeMo-RL's `load_config` on files, then its `parse_hydra_overrides`: the values of the names that are set."""
    from nemo_rl_commands import NAMES
    from omegaconf import OmegaConf

    module = _module_at("nemo_rl/utils/config.py")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in question["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        config = module.load_config(str(Path(folder, "run.yaml")))
    config = module.parse_hydra_overrides(config, question["words"])
    return values_at(OmegaConf.to_container(config), NAMES)


def megatron_bridge(question: dict[str, Any]) -> Any:
    """Megatron Bridge's own merge of a recipe, a file and overrides."""
    import bridge_command
    from bridge_commands import NAMES

    return bridge_command.run(question["text"], question["words"], NAMES)


def verl(question: dict[str, Any]) -> Any:
    """verl's configuration as Hydra composes it, with its own classes made of each engine's section."""
    import verl_command
    from verl_commands import asked_names

    return verl_command.run(question["name"], question["words"], asked_names(question["words"]))


def ms_swift(question: dict[str, Any]) -> Any:
    """ms-swift's command line, made of a file or not, as its own argument classes take it."""
    import ms_swift_command
    from ms_swift_commands import NAMES

    given = ms_swift_command.run(question["text"], question["suffix"], question["words"], NAMES)
    said = " ".join([question["text"] or "", *question["words"]]).replace("-", "_")
    return {name: value for name, value in given.items() if name[:-1] in said}


def megatron_lm(question: dict[str, Any]) -> Any:
    """Megatron-LM's own argparse, on the words of a command; nothing is checked behind it."""
    from megatron_lm_commands import NAMES

    parser = _of_megatron_lm()
    destinations = {option: action.dest for action in parser._actions for option in action.option_strings}
    given = parser.parse_args(question["words"])
    return {name: getattr(given, destinations[name]) for name in NAMES if name in destinations}


@lru_cache
def _of_megatron_lm() -> Any:
    """Return Megatron-LM's parser; from 0.18 on its code is written for Python 3.12, of which it uses `override`."""
    import argparse
    import typing

    typing.override = getattr(typing, "override", lambda method: method)
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def prime_rl(question: dict[str, Any]) -> Any:
    """prime-rl's files as its command merges them, and its trainer's class made of the result."""
    import tomllib

    sys.modules.setdefault("tomli", tomllib)
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl_files import FULL, NAMES

    cli = sys.modules["pydantic_config.cli"]
    merged: dict[str, Any] = {}
    for text in question["texts"]:
        merged = cli._deep_merge(merged, cli._load_config_file(_written({"text": text, "suffix": ".toml"})))
    trainer = TrainerConfig.model_validate(merged.get("trainer", {}))
    return {
        name: bool(value) if name == FULL else value
        for name, value in values_at(trainer.model_dump(), NAMES).items()
    }


def torchtune(question: dict[str, Any]) -> Any:
    """torchtune's own parser and merge, of a file and overrides."""
    import torchtune_command
    from torchtune_commands import NAMES

    return torchtune_command.run(question["text"], question["words"], NAMES)


def torchtitan(question: dict[str, Any]) -> Any:
    """torchtitan's `ConfigManager` on a TOML and options; the class does not look for the files that it names."""
    from torchtitan_commands import NAMES

    path = _written({"text": question["text"], "suffix": ".toml"})
    config = _torchtitan_manager().parse_args(["--job.config_file", path, *question["words"]])
    sections = {section: vars(value) for section, value in vars(config).items() if hasattr(value, "__dict__")}
    return values_at(sections, NAMES)


def torchtitan_options(question: dict[str, Any]) -> Any:
    """torchtitan's `ConfigManager` from 0.3 on, over a function that returns a configuration: the words' settings."""
    import torchtitan_command
    from torchtitan_options import NAMES

    return torchtitan_command.run(_torchtitan_manager(), question["words"], NAMES)


@lru_cache
def _torchtitan_manager() -> Any:
    """Return the one manager of all questions: each new one adds a rule to the registry, which slows every question."""
    try:
        from torchtitan.config import ConfigManager
    except ImportError:  # before 0.2
        from torchtitan.config_manager import ConfigManager
    ConfigManager._validate_config = lambda self: None
    return ConfigManager()


@lru_cache
def _module_at(path: str) -> Any:
    """Return the module at `path` in the first folder of the release, without its package."""
    file = next(Path(each, path) for each in sys.path if Path(each, path).is_file())
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lightning(question: dict[str, Any]) -> Any:
    """Lightning's own Trainer or Fabric with a strategy, made by running a script that this campaign has written.

    DeepSpeed is a module of the name: the strategy makes its JSON before it asks anything else of it.
    """
    from lightning_script import run
    from lightning_scripts import NAMES

    return run(question["text"], question["files"], NAMES)


def trl(question: dict[str, Any]) -> Any:
    """The arguments that `trl sft` gives its classes, before they check them."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser
    from trl.scripts.utils import DatasetMixtureConfig

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    left = parser.set_defaults_with_config(**question["recipe"]) if question["recipe"] else []
    arguments, more = parser.parse_known_args(question["words"])
    if left or more:
        raise ValueError(f"not used: {left} {more}")
    names = (
        "gradient_checkpointing",
        "activation_offloading",
        "auto_find_batch_size",
        "use_liger_kernel",
        "save_only_model",
    )
    numbers = (
        "max_steps",
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "learning_rate",
        "max_grad_norm",
    )
    return {name: getattr(arguments, name) for name in (*names, *numbers, "bf16", "activation_checkpointing")}


def hf(question: dict[str, Any]) -> Any:
    """`HfArgumentParser` alone, as the examples of Transformers use it, on the Trainer's own arguments.

    A file as the only argument is read by `parse_yaml_file` or `parse_json_file`, anything else by argparse. The class
    does not check its arguments.
    """
    from transformers import HfArgumentParser, TrainingArguments

    TrainingArguments.__post_init__ = lambda self: None
    parser = HfArgumentParser(TrainingArguments)
    if question["text"] is None:
        (given,) = parser.parse_args_into_dataclasses(args=question["words"])
    else:
        path = _written(question)
        read = parser.parse_json_file if path.endswith(".json") else parser.parse_yaml_file
        (given,) = read(path)
    return {name: getattr(given, name) for name in NAMES}


def llama_factory(question: dict[str, Any]) -> Any:
    """LLaMA-Factory's `read_args` and parser, on the words of its command; the classes do not check their arguments."""
    parser = _of_llama_factory()
    path = [] if question["text"] is None else [_written(question)]
    sys.argv = ["train.py", *path, *question["words"]]
    given = parser._parse_args(parser.HfArgumentParser(parser._TRAIN_ARGS))
    values = {name: value for each in given for name, value in vars(each).items()}
    return {name: values[name] for name in NAMES if name in values}


@lru_cache
def _of_llama_factory() -> Any:
    """Return the module of LLaMA-Factory's parser."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "llama_factory"))
    import llama_factory_witness

    os.environ["DISABLE_VERSION_CHECK"] = "1"
    parser = llama_factory_witness.prepare()
    for each in parser._TRAIN_ARGS:
        each.__post_init__ = lambda self: None
    return parser


def _written(question: dict[str, Any]) -> str:
    """Return the path of a file with the question's text, which the next question replaces."""
    path = Path(tempfile.gettempdir(), f"parser-witness-{os.getpid()}{question['suffix']}")
    path.write_text(question["text"], encoding="utf-8")
    return str(path)


def mapping(value: Any) -> Any:
    """Return the value; no framework takes a configuration that is no mapping."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(type(value).__name__)
    return value


def answer(parser: Callable[[dict[str, Any]], Any], question: dict[str, Any]) -> Answer:
    """Return the parser's answer to one question."""
    try:
        return {"value": encoded(parser(question))}
    except (Exception, SystemExit) as error:
        # Behind it Hydra lists the folders that it has searched, those of whoever records.
        said = str(error).partition("\nConfig search path:")[0]
        return {"raised": f"{type(error).__name__}: {said}"[:300]}


def main() -> None:
    """Answer until the input ends."""
    name, *folders = sys.argv[1:]
    here = str(Path(__file__).parent)
    sys.path[:] = [*folders, here, *(each for each in sys.path if each != here)]
    answers, sys.stdout = sys.stdout, sys.stderr
    parser = globals()[name]
    for line in sys.stdin:
        print(json.dumps(answer(parser, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
