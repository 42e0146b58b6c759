# SPDX-License-Identifier: Apache-2.0
"""Asks SkyRL: `SkyRLTrainConfig.from_cli_overrides` with `validate_cfg`, and `SFTConfig` with `validate_sft_cfg`.

Both are SkyRL's own, on OmegaConf's own parser; torch, Ray and vLLM are stood in for.
"""

import dataclasses
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import stand_ins

NAME = "skyrl"
RELEASES = ("0.1.0", "0.2.0", "0.3.0", "0.4.0")
WHEEL = "skyrl"
# The tensors' places: no check states them; assertions of a worker when it is built; a text that counts as true.
NOT_JUDGED = {
    "sky-async-colocated",
    "sky-native-offload",
    "sky-states-stay",
    "sky-states-megatron",
    "sky-states-alone",
    "sky-fsdp-megatron",
    "sky-megatron-fsdp",
    "sky-text-is-true",
}
_SFT_SINCE = "0.2.0"
_TRUTHS = ("true", "false", "True", "no", "on", "null", "''", "None", "maybe")


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        importlib.import_module("omegaconf")
        self._release = stand_ins.Release(
            folder,
            own=("skyrl",),
            real=("omegaconf", "yaml"),
            mocked=("skyrl.backends.backend", "skyrl.tinker", "skyrl.utils.log"),
        )

    def ask(self, program: str, words: list[str]) -> Any:
        """Build and check a configuration; raise the release's error."""
        with self._release:
            if program == "main_sft":
                sft = importlib.import_module("skyrl.train.config.sft_config")
                return sft.validate_sft_cfg(sft.SFTConfig.from_cli_overrides(words))
            configuration = _configurations().SkyRLTrainConfig.from_cli_overrides(words)
            return importlib.import_module("skyrl.train.utils.utils").validate_cfg(configuration)

    def names(self) -> Iterator[str]:
        """Yield the fields of both trainers; a mapping that is free is `NAME.*`, those of SFT stand behind `sft.`."""
        yield from (f"environment.skyrl_gym.{name}.*" for name in ("search", "text2sql"))  # of skyrl_gym
        with self._release:
            yield from _fields(_configurations().SkyRLTrainConfig, "")
            if (self._folder / "skyrl/train/config/sft_config.py").is_file():
                yield from _fields(importlib.import_module("skyrl.train.config.sft_config").SFTConfig, "sft.")
            if (self._folder / "skyrl/train/config/legacy.py").is_file():
                legacy = importlib.import_module("skyrl.train.config.legacy")
                yield from (f"generator.{name}" for name in legacy.GENERATOR_TO_INFERENCE_ENGINE_FIELDS)
                yield "generator.engine_init_kwargs.*"


def _configurations() -> Any:
    return importlib.import_module("skyrl.train.config")


def _fields(kind: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        yield name
        inner = [each for each in (field.type, *get_args(field.type)) if dataclasses.is_dataclass(each)]
        if inner:
            yield from _fields(inner[0], f"{name}.")
        elif "dict" in str(field.type).lower():
            yield f"{name}.*"


def asked(chance: random.Random, release: str) -> tuple[str, list[str]]:
    """Return a program and its words."""
    share = chance.choice([0.15, 0.4, 0.7])
    if release >= _SFT_SINCE and chance.random() < 0.15:
        return "main_sft", _words_of_sft(chance, share)
    gpus = chance.choice([1, 2, 4])
    words = ["trainer.logger=console", f"trainer.placement.policy_num_gpus_per_node={gpus}"]
    words.append(f"trainer.placement.ref_num_gpus_per_node={gpus}")
    engines = gpus if chance.random() < 0.7 else chance.choice([1, 2, 4])
    words.append(f"generator.inference_engine.num_engines={engines}")
    if chance.random() < share:
        words.append(f"generator.inference_engine.tensor_parallel_size={chance.choice([1, 2])}")
    given = {
        "trainer.strategy": ("fsdp", "fsdp2", "megatron"),
        "trainer.placement.colocate_all": ("true", "false", "False"),
        "trainer.placement.colocate_policy_ref": ("true", "false"),
        "trainer.policy.fsdp_config.cpu_offload": _TRUTHS,
        "trainer.critic.fsdp_config.cpu_offload": _TRUTHS,
        "trainer.ref.fsdp_config.cpu_offload": _TRUTHS,
        "trainer.policy.optimizer_config.offload_after_step": ("true", "false"),
        "trainer.policy.megatron_config.optimizer_config_kwargs.optimizer_cpu_offload": ("true", "false"),
        "trainer.policy.megatron_config.optimizer_config_kwargs.optimizer_offload_fraction": ("0.5", "1.0"),
        "trainer.critic.model.path": ("a/b", "null", "null"),
        "trainer.gradient_checkpointing": ("true", "false"),
    }
    if release >= "0.3.0":
        given["trainer.policy.torch_profiler_config.enable"] = ("true", "false")
        words.append("trainer.policy.torch_profiler_config.save_path=/traces")
    words += [f"{name}={chance.choice(values)}" for name, values in given.items() if chance.random() < share]
    if chance.random() < 0.1:
        url = chance.choice(
            ["external_proxy_url=http://a", "external_proxy_url=null", "external_server_urls=[http://b]"]
        )
        words.append(f"generator.inference_engine.{url}")
    if chance.random() < 0.05:
        words.append(f"trainer.policy.fsdp_config={{cpu_offload: {chance.choice(['true', 'false'])}}}")
    return "entrypoints.main_base", [*words, *_slip(chance, "trainer.policy.")]


def _words_of_sft(chance: random.Random, share: float) -> list[str]:
    given = {
        "strategy": ("fsdp", "megatron"),
        "fsdp_config.cpu_offload": _TRUTHS,
        "optimizer_config.offload_after_step": ("true", "false"),
        "megatron_config.optimizer_config_kwargs.optimizer_cpu_offload": ("true", "false"),
    }
    words = [f"{name}={chance.choice(values)}" for name, values in given.items() if chance.random() < share]
    return [*words, *_slip(chance, "")]


def _slip(chance: random.Random, section: str) -> list[str]:
    """Return a word that nobody takes, now and then: a plus, a name of no class, one of another section."""
    kind = chance.random()
    if kind < 0.04:
        return [f"+{section}fsdp_config.cpu_offload=true"]
    if kind < 0.08:
        return [
            f"{section}fsdp_config.{chance.choice(['param_offload', 'cpu_ofload', 'offload_params'])}=true"
        ]
    return [f"{section}optimizer_config.cpu_offload=true"] if kind < 0.1 else []


def command(program: str, words: list[str]) -> str:
    """Return the launch script that lint reads."""
    quoted = (f"'{word}'" if set(word) & set("{}[]'* ") and "'" not in word else word for word in words)
    shown = (word.replace("''", "\"''\"") for word in quoted)
    return f"uv run -m skyrl.train.{program} {' '.join(shown)}\n"
