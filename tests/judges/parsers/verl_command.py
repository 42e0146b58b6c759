# SPDX-License-Identifier: Apache-2.0
"""Asks the release of verl on the path for the configuration of its PPO trainer; imported by the witness.

Hydra composes the release's files, its own code applies the overrides, and the release's classes check each engine's
section. Packages that verl imports beside torch and transformers are stand-ins, because nothing is started here.
"""

import copy
import importlib.abc
import importlib.machinery
import sys
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from dotted_names import values_at

_ABSENT = frozenset(
    {
        "ray", "tensordict", "codetiming", "vllm", "megatron", "torchdata", "transfer_queue", "wandb", "mlflow", "cupy",
        "zmq", "orjson", "aiohttp", "uvicorn", "fastapi", "cachetools", "sglang",
    }
)  # fmt: skip
_KEPT = ("actor_rollout_ref", "critic", "algorithm", "model_engine")
_ENGINES = ("fsdp_config", "fsdp", "megatron", "veomni", "torchtitan")
_OF_ROLE = (*_ENGINES, "optim", "strategy", "model", "_target_", "entropy_checkpointing")
_GROUPS = ("model_engine",)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that hold anything."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_absent = name.partition(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "9.0.0"
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


@lru_cache
def _loaded() -> Path:
    """Import the release's configuration classes; return the folder of its files."""
    import transformers

    sys.meta_path.append(_StandIns())
    for name in ("AutoModelForVision2Seq",):  # of Transformers before 5
        if not hasattr(transformers, name):
            setattr(transformers, name, MagicMock())
    import verl
    import verl.workers.config

    verl.workers.config.HFModelConfig.__post_init__ = lambda self: None  # it asks the hub
    return Path(str(verl.__file__)).parent / "trainer" / "config"


@lru_cache
def _base(name: str, groups: tuple[str, ...]) -> Any:
    """Return a composed configuration without the sections that no name is in."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    with initialize_config_dir(str(_loaded().resolve()), version_base=None):
        config = compose(name, overrides=list(groups))
    with open_dict(config):
        for section in set(config) - set(_KEPT):
            del config[section]
        config.actor_rollout_ref.pop("rollout")
        for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
            for name in set(role) - set(_OF_ROLE):
                del role[name]
    OmegaConf.set_struct(config, True)
    return config


def run(name: str, words: list[str], names: list[str]) -> dict[str, Any]:
    """Return the values of `names` that the configuration has; raises the error of Hydra or of verl's classes."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    if any(word.startswith("-") for word in words):
        raise ValueError("Hydra's own command has no such option")
    groups = tuple(word for word in words if word.partition("=")[0] in _GROUPS)
    config = copy.deepcopy(_base(name, groups))
    parsed = OverridesParser.create().parse_overrides([word for word in words if word not in groups])
    if any(each.is_sweep_override() for each in parsed):
        raise ValueError("a sweep")
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    roles = (config.actor_rollout_ref.actor, config.critic)
    for role in roles:
        _require_fields(role)
    sections = [each.get(name) for each in roles for name in (*_ENGINES, "optim")]
    sections.append(config.actor_rollout_ref.ref.get("fsdp_config"))  # of the worker of a reference
    for section in (*sections, config.actor_rollout_ref.model, config.critic.get("model")):
        if section is not None and "_target_" in section:
            instantiate(section, _convert_="partial")
    return values_at(OmegaConf.to_container(config, resolve=False), names)


def _require_fields(role: Any) -> None:
    """Raise for a name that the role's class has no field for."""
    from hydra.utils import get_class

    names = {str(name) for name in role if name != "_target_"}
    try:
        role_class = get_class(role["_target_"])
    except ImportError:  # verl 0.7.1 names a critic of VeOmni that it does not have
        return
    unexpected = names - {each.name for each in fields(role_class)}
    if unexpected:
        raise TypeError(f"unexpected keyword argument {unexpected}")
