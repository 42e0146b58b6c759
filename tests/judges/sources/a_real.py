# SPDX-License-Identifier: Apache-2.0
"""Asks AReaL: `parse_cli_args` and `to_structured_cfg` on Hydra and OmegaConf, then the RL trainer's `_validate_cfg`.

The lines of `PPOTrainer.__init__` before that check run unchanged, and no others of it.
"""

import ast
import functools
import importlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, get_args

import stand_ins
from source_parts import Sources

NAME = "areal"
RELEASES = (
    *(("1.0.0", "1.0.1") if sys.version_info >= (3, 12) else ()),
    "1.0.2",
    "1.0.3",
    "1.0.4",
)  # in its syntax
REPOSITORY = "inclusionAI/AReaL"
FILENAME = "config.yaml"
MOST = 2000  # of which Hydra and OmegaConf take a tenth of a second each
# Rules about engines built or asked to leave, and about settings without a reader.
NOT_JUDGED = {
    "areal-per-layer-adam",
    "areal-other-engine",
    "areal-enable-alone",
    "areal-offload-unread",
    "areal-dpo-not-enabled",
    "areal-optimizer-offload",
    "areal-per-layer-engine",
}
_CHECKED_SINCE = "1.0.3"
_TRAINER = "areal.trainer.rl_trainer"
_NAMES = "{experiment_name: a, trial_name: b, fileroot: c}"
_BASE = f"""experiment_name: a
trial_name: b
saver: {_NAMES}
recover: {_NAMES}
evaluator: {_NAMES}
stats_logger: {_NAMES}
train_dataset: {{path: c, type: rl}}
"""
_ENGINES_OF_ROLLOUT = ("sglang", "vllm")  # whose options their own release decides
_TRUTHS = ("true", "false", "on", "no", "1", "'yes'", "null", "maybe", "[]", "2.5")


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        for library in (
            "omegaconf",
            "hydra.core.global_hydra",
            "hydra.core.hydra_config",
            "packaging.version",
            "lark",
        ):
            importlib.import_module(library)
        kept = importlib.import_module("omegaconf").OmegaConf  # whose merge copies its first argument
        self._kept = type("Kept", (kept,), {"structured": staticmethod(functools.cache(kept.structured))})
        self._folder = folder
        self._sources = Sources(folder)
        self._file = Path(tempfile.mkdtemp()) / FILENAME
        self._release = stand_ins.Release(
            folder,
            own=("areal",),
            real=("omegaconf", "hydra", "yaml", "antlr4", "packaging", "lark"),
            mocked=(
                "areal.utils.logging",
                "areal.infra",
                "areal.engine",
                "areal.experimental",
                "areal.dataset",
                "areal.workflow",
            ),
        )

    def ask(self, kind: str, text: str, overrides: list[str]) -> Any:
        """Build and check a configuration; raise the release's error."""
        self._file.write_text(text, encoding="utf-8")
        with self._release:
            arguments = importlib.import_module("areal.api.cli_args")
            arguments.OmegaConf = self._kept
            composed, _ = arguments.parse_cli_args(["train.py", "--config", str(self._file), *overrides])
            made = arguments.to_structured_cfg(composed, getattr(arguments, kind))
            configuration = arguments.OmegaConf.to_object(made)
            if kind == "PPOConfig" and self._folder.name >= _CHECKED_SINCE:
                self._check(configuration)

    def _check(self, configuration: Any) -> None:
        trainer = SimpleNamespace(config=configuration)
        trainer._is_colocation = self._of_trainer("_is_colocation")
        for name in ("_is_actor_rollout_colocated", "_validate_cfg"):
            setattr(trainer, name, MethodType(self._of_trainer(name), trainer))
        allocation = importlib.import_module("areal.api.alloc_mode").ModelAllocation
        names = {"self": trainer, "config": configuration, "ModelAllocation": allocation}
        exec(compile(ast.Module(self._worked_out(), []), "PPOTrainer.__init__", "exec"), names)
        trainer._validate_cfg()

    def _of_trainer(self, method: str) -> Any:
        return self._sources.take(_TRAINER, f"PPOTrainer.{method}")

    def _worked_out(self) -> list[ast.stmt]:
        """Return the statements of `PPOTrainer.__init__` about roles that leave the GPU, and the backends."""
        source = ast.parse((self._folder / "areal/trainer/rl_trainer.py").read_text(encoding="utf-8"))
        classes = (
            each for each in source.body if isinstance(each, ast.ClassDef) and each.name == "PPOTrainer"
        )
        functions = (node for each in classes for node in each.body if isinstance(node, ast.FunctionDef))
        init = next(node for node in functions if node.name == "__init__")
        wanted = ("self._should_", "self.rollout_alloc", "self.actor_alloc")
        assigned = (node for node in init.body if isinstance(node, ast.Assign))
        return [node for node in assigned if ast.unparse(node.targets[0]).startswith(wanted)]

    def names(self) -> Iterator[str]:
        """Yield the fields of all configurations; a mapping that is free is `NAME.*`."""
        with self._release:
            arguments = importlib.import_module("areal.api.cli_args")
            for kind in ("PPOConfig", "SFTConfig", "RWConfig", "DPOConfig"):
                if hasattr(arguments, kind):
                    yield from _fields(getattr(arguments, kind), "")


def _fields(kind: Any, prefix: str) -> Iterator[str]:
    for name, field in kind.__dataclass_fields__.items():
        yield f"{prefix}{name}"
        if f"{prefix}{name}" in _ENGINES_OF_ROLLOUT:
            yield f"{prefix}{name}.*"
            continue
        inner = [
            each for each in (field.type, *get_args(field.type)) if hasattr(each, "__dataclass_fields__")
        ]
        if inner:
            yield from _fields(inner[0], f"{prefix}{name}.")
        elif "dict" in str(field.type).lower():
            yield f"{prefix}{name}.*"


def asked(chance: random.Random, release: str) -> tuple[str, str, list[str]]:
    """Return a class, a file and overrides."""
    kinds = [
        "PPOConfig",
        "PPOConfig",
        "PPOConfig",
        "SFTConfig",
        *(["DPOConfig"] if release >= "1.0.4" else []),
    ]
    kind = chance.choice(kinds)
    share = chance.choice([0.15, 0.4, 0.7])
    roles = ["actor"] + ["ref"] * (kind == "DPOConfig" or (kind == "PPOConfig" and chance.random() < 0.6))
    roles += [role for role in ("critic", "teacher") if kind == "PPOConfig" and chance.random() < 0.3]
    text = _BASE
    if kind == "PPOConfig":
        text += f"rollout:\n  experiment_name: a\n  trial_name: b\n{_backend(release, 'sglang:d4')}"
        text += _colocation(chance, "actor") if release >= _CHECKED_SINCE else ""
    for role in roles:
        text += f"{role}:\n{_role(chance, share, role, release)}"
    if chance.random() < 0.6:
        text += f"enable_offload: {chance.choice(['true', 'false', 'True', 'on', 'maybe'])}\n"
    return kind, text, _overrides(chance, text, release)


def _backend(release: str, value: str) -> str:
    return f"  backend: {value}\n" if release >= _CHECKED_SINCE else ""


def _colocation(chance: random.Random, target: str) -> str:
    if chance.random() < 0.7:
        return ""
    kind = chance.choice(["colocation", "colocation", "separation"])
    return (
        f"  scheduling_strategy: {{type: {kind}, target: {chance.choice([target, target, 'ref', 'null'])}}}\n"
    )


def _role(chance: random.Random, share: float, role: str, release: str) -> str:
    text = "  experiment_name: a\n  trial_name: b\n  path: d\n"
    text += _backend(release, chance.choice(["fsdp:d4", "megatron:d4", "archon:d4"]))
    if release >= _CHECKED_SINCE and chance.random() < share:
        text += f"  offload: {chance.choice(_TRUTHS[:5] if chance.random() < 0.8 else _TRUTHS)}\n"
    if role == "actor" and chance.random() < share:
        text += f"  weight_update_mode: {chance.choice(['disk', 'disk', 'xccl'])}\n"
    if role == "actor" and release >= _CHECKED_SINCE:
        text += _colocation(chance, "rollout")
    if chance.random() < share:
        text += f"  init_from_scratch: {chance.choice(['true', 'false'])}\n"
    fields = {
        "offload_params": chance.choice(_TRUTHS[:4] if chance.random() < 0.8 else _TRUTHS),
        "memory_efficient_load": chance.choice(["true", "false"]),
        "per_layer_optim_step": chance.choice(["true", "false"]),
        "optim_step_prefetch_layers": chance.choice(
            ["0", "1", "2", "-1", "'3'", "x"] if chance.random() < 0.2 else ["1"]
        ),
    }
    if chance.random() < 0.06:
        fields[chance.choice(["param_offload", "cpu_offload", "offload_param"])] = "true"
    given = [f"{name}: {value}" for name, value in fields.items() if chance.random() < share]
    text += f"  fsdp: {{{', '.join(given)}}}\n" if given else ""
    if chance.random() < share / 2:
        text += f"  archon: {{offload_params: {chance.choice(_TRUTHS[:4])}}}\n"
    if chance.random() < share:
        text += f"  optimizer: {{type: {chance.choice(['adam', 'sgd'])}}}\n"
    return text


def _overrides(chance: random.Random, text: str, release: str) -> list[str]:
    """Return none mostly, else one that Hydra takes or refuses, after the file's value."""
    if chance.random() < 0.8:
        return []
    key = chance.choice(
        ["actor.path", "actor.fsdp.offload_params", "enable_offload", "trial_name", "actor.lr"]
    )
    sign = chance.choice(["", "", "+", "++"])
    return [f"{sign}{key}={'true' if 'offload' in key else 'x'}"]


def command(kind: str, text: str, overrides: list[str]) -> str:
    """Return the file that lint reads."""
    return text


def overrides(kind: str, text: str, overrides: list[str]) -> tuple[str, ...]:
    """Return the words behind it on the command line."""
    return tuple(overrides)
