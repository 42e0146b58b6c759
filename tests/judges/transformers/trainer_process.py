# SPDX-License-Identifier: Apache-2.0
"""Asks one release of transformers, and TRL beside it, its answer to arguments; a process of its own, on a CPU.

    python trainer_process.py build/transformers/5.23.0 build/transformers/dependencies-5 build/transformers/beside

Each line of the input is a request in JSON, each line of the output its answer. `{"fields": [module, ..]}` asks for the
fields of the dataclasses of some modules; anything else is a run:

    {"class": "SFTConfig", "arguments": {..}, "distributed": true, "hidden_size": 64}

The answer's `errors` is the first exception of each reached stage: the arguments' own checks, the Trainer's checks of
its accelerator, DeepSpeed's values against the Trainer's. `warnings` are the logged lines and warnings meanwhile. Parts
of a machine have stand-ins: a CUDA device with bf16, an initialized process group, DeepSpeed.
"""

import dataclasses
import importlib
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = {
    "TrainingArguments": "transformers.training_args",
    "Seq2SeqTrainingArguments": "transformers.training_args_seq2seq",
    "SFTConfig": "trl.trainer.sft_config",
    "DPOConfig": "trl.trainer.dpo_config",
    "GRPOConfig": "trl.trainer.grpo_config",
    "RLOOConfig": "trl.trainer.rloo_config",
    "KTOConfig": "trl.trainer.kto_config",
    "RewardConfig": "trl.trainer.reward_config",
    "DistillationConfig": "trl.trainer.distillation_config",
}


class Heard(logging.Handler):
    """Keeps messages at the level of a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.texts.append(record.getMessage())


def stand_in(distributed: Callable[[], bool]) -> None:
    """Let the arguments see a distributed run on CUDA devices with bf16, and DeepSpeed installed."""
    import torch
    from accelerate.utils import dataclasses as plugins
    from transformers import training_args

    torch.cuda.current_device = lambda: 0
    plugins.is_cuda_available = lambda: True
    arguments = training_args.TrainingArguments
    mode = training_args.ParallelMode
    arguments.device = property(lambda _: torch.device("cpu"))
    arguments._setup_devices = torch.device("cpu")
    arguments.n_gpu = property(lambda _: 1)
    arguments.world_size = property(lambda _: 1)
    arguments.parallel_mode = property(lambda _: mode.DISTRIBUTED if distributed() else mode.NOT_PARALLEL)
    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        setattr(training_args, name, lambda: True)


class Plugins:
    """Stands in for `accelerate.Accelerator`: keeps the plugins that the Trainer asks it about."""

    def __init__(self, fsdp_plugin: object = None, deepspeed_plugin: object = None, **_: object) -> None:
        if fsdp_plugin is None and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            from accelerate.utils import FullyShardedDataParallelPlugin

            fsdp_plugin = FullyShardedDataParallelPlugin()
        self.state = SimpleNamespace(
            fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, torch_tp_plugin=None
        )
        self.gather_for_metrics = lambda _: None


def stages(request: dict[str, Any]) -> list[Callable[[dict[str, Any]], None]]:
    """Return the calls in turn, each with the results of those before it."""

    def construct(left: dict[str, Any]) -> None:
        name = request["class"]
        cls = getattr(importlib.import_module(MODULES[name]), name)
        left["args"] = cls(output_dir=left["folder"], **request["arguments"])

    def postprocess(left: dict[str, Any]) -> None:
        from transformers import Trainer, trainer
        from transformers.training_args import ParallelMode

        trainer.Accelerator = Plugins
        args = left["args"]
        stub = Trainer.__new__(Trainer)
        stub.args = args
        stub.model = SimpleNamespace(is_activation_checkpointing=False, is_gradient_checkpointing=False)
        stub.is_distributed_loading_by_transformers = False
        stub.create_accelerator_and_postprocess()
        left["stub"] = stub
        # The next questions of `Trainer.__init__`; the rest of it needs a model on a device.
        if args.fsdp:
            if stub.is_deepspeed_enabled:
                raise ValueError(
                    "Using --fsdp xxx together with --deepspeed is not possible, deactivate one of those flags."
                )
            if not args.fsdp_config.get("xla") and args.parallel_mode != ParallelMode.DISTRIBUTED:
                raise ValueError("Using fsdp only works in distributed training.")

    def finalize(left: dict[str, Any]) -> None:
        config = getattr(left["args"], "hf_deepspeed_config", None)
        if config is not None:
            model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
            config.trainer_config_finalize(left["args"], model, 1000)

    return [construct, postprocess, finalize]


def answer(request: dict[str, Any], heard: Heard) -> dict[str, Any]:
    """Go through the stages until one raises."""
    heard.texts.clear()
    environment = dict(os.environ)
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left: dict[str, Any] = {"folder": folder}
        try:
            for stage in stages(request):
                stage(left)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    os.environ.clear()
    os.environ.update(environment)
    return {"errors": errors, "warnings": [*heard.texts, *(str(each.message) for each in caught)]}


def without_trainers(name: str) -> None:
    """Stand in for the packages of an experimental module: they import trainers, which need missing packages."""
    parents = name.split(".")[:-1]
    for depth in range(2, len(parents) + 1):
        package = ".".join(parents[:depth])
        if "experimental" in package and package not in sys.modules:
            root = importlib.import_module(parents[0])
            stub = ModuleType(package)
            stub.__path__ = [str(Path(str(root.__file__)).parent.joinpath(*parents[1:depth]))]
            sys.modules[package] = stub


def fields(names: list[str]) -> dict[str, list[str]]:
    """Return the fields of each dataclass that one of the modules defines."""
    found = {}
    for name in names:
        without_trainers(name)
        module = importlib.import_module(name)
        for cls in vars(module).values():
            if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == name:
                found[cls.__name__] = [each.name for each in dataclasses.fields(cls) if each.init]
    return found


def write_deepspeed(folder: Path) -> None:
    """Write a package to be found in DeepSpeed's place; nothing of it is called."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("")
    (folder / "deepspeed-0.19.8.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n"
    (folder / "deepspeed-0.19.8.dist-info" / "METADATA").write_text(metadata)


def main() -> None:
    """Answer until the input ends."""
    empty = tempfile.TemporaryDirectory()
    write_deepspeed(Path(empty.name))
    sys.path[:0] = [*sys.argv[1:], empty.name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    answers, sys.stdout = sys.stdout, sys.stderr  # a library that prints does not spoil the answers
    checks = ModuleType("transformers.dependency_versions_check")  # a fetched release need not be the newest
    checks.dep_version_check = lambda *_: None  # type: ignore[attr-defined]
    sys.modules[checks.__name__] = checks
    run = {"distributed": True}
    stand_in(lambda: run["distributed"])
    heard = Heard()
    for name in ("transformers", "accelerate", "trl"):
        logging.getLogger(name).addHandler(heard)
        logging.getLogger(name).propagate = False
    for line in sys.stdin:
        request = json.loads(line)
        if "fields" in request:
            print(json.dumps(fields(request["fields"])), file=answers, flush=True)
            continue
        run["distributed"] = request.get("distributed", True)
        print(json.dumps(answer(request, heard)), file=answers, flush=True)


if __name__ == "__main__":
    main()
