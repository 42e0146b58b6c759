"""Asks LLaMA-Factory's own parser: a process that answers one question a line.

    python llama_factory_witness.py build/judges/llama_factory/0.9.5 build/judges/llama_factory/dependencies

A question is `{"config": {..}, "distributed": true}`; the answer says what the parser raised, if anything. The parser
and the argument classes are the release's own, over a real Transformers. What asks the machine (devices, processes,
installed packages) is answered here.
"""

import enum
import importlib.machinery
import json
import os
import sys
import types
from typing import Any


class World:
    """What the parser learns of the machine: set before each question."""

    distributed = False


def stub(name: str, **values: Any) -> None:
    """Put a module in the place of a package that is not needed."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(values)
    sys.modules[name] = module


def prepare() -> Any:
    """Return the parser's module, with the machine's answers in place."""
    stub("peft", __version__="0")
    for name in ("datasets", "trl"):
        stub(name, __version__="0", DownloadMode=enum.Enum("DownloadMode", ["REUSE_DATASET_IF_EXISTS"]))
    stub("peft.utils", SAFETENSORS_WEIGHTS_NAME="a.safetensors", WEIGHTS_NAME="a.bin")
    import accelerate.utils
    import torch
    from transformers import training_args
    from transformers.integrations import deepspeed

    class Section:
        """A DeepSpeed configuration, as far as the stage is asked."""

        def __init__(self, section: Any) -> None:
            self.config = section

        def is_zero3(self) -> bool:
            return bool(self.config.get("zero_optimization", {}).get("stage", 0) == 3)

    class Finalized(Section):
        def trainer_config_process(self, _arguments: Any, *_more: Any) -> None:
            deepspeed._hf_deepspeed_config_weak_ref = lambda: self

    deepspeed.HfTrainerDeepSpeedConfig = Finalized
    arguments = training_args.TrainingArguments
    arguments._setup_devices = property(lambda self: torch.device("cpu"))
    arguments.device = property(lambda self: torch.device("cpu"))
    arguments.n_gpu = property(lambda self: 1)
    mode = training_args.ParallelMode
    arguments.parallel_mode = property(
        lambda self: mode.DISTRIBUTED if World.distributed else mode.NOT_PARALLEL
    )
    arguments.distributed_state = None
    accelerate.utils.DeepSpeedPlugin = lambda *_, **__: types.SimpleNamespace(
        set_mixed_precision=lambda *_: None, set_deepspeed_weakref=lambda: None
    )

    from llamafactory.hparams import parser

    parser.is_torch_bf16_gpu_available = lambda: True
    for name in ("check_version", "require_version", "check_dependencies", "_set_transformers_logging"):
        if hasattr(parser, name):
            setattr(parser, name, lambda *_, **__: None)
    return parser


def main() -> None:
    """Answer questions until there are no more."""
    release, dependencies = sys.argv[1:3]
    sys.path[:0] = [release, dependencies]
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    answers = sys.stdout
    sys.stdout = sys.stderr
    parser = prepare()
    from transformers.integrations import deepspeed

    for line in sys.stdin:
        question = json.loads(line)
        World.distributed = question["distributed"]
        deepspeed._hf_deepspeed_config_weak_ref = None
        raised = None
        try:
            parser.get_train_args(question["config"])
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        print(json.dumps({"raised": raised}), file=answers, flush=True)


if __name__ == "__main__":
    main()
