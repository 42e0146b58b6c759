# SPDX-License-Identifier: Apache-2.0
"""Asks LLaMA-Factory's own parser: a process that answers one question a line.

    python llama_factory_witness.py build/judges/llama_factory/0.9.5 build/judges/llama_factory/transformers-5.5.0

A question is `{"config": {..}, "distributed": true}`; the answer is the parser's error, or the Trainer that gets
the arguments. The parser and the argument classes are the release's own, over a real Transformers. Code that asks the
machine (devices, processes, installed packages) is answered here and in the witness of Transformers.
"""

import enum
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "transformers"))

from trainer_process import stages, stand_in, write_deepspeed


def stub(name: str, **values: Any) -> None:
    """Put a module in the place of a package that is not needed."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(values)
    sys.modules[name] = module


def prepare() -> Any:
    """Return the parser's module, with the machine's answers in place."""
    stub("transformers.dependency_versions_check", dep_version_check=lambda *_: None)
    stub(
        "peft",
        __version__="0",
        PeftModel=type("PeftModel", (), {}),
        PeftMixedModel=type("PeftMixedModel", (), {}),
    )
    for name in ("datasets", "trl"):
        stub(name, __version__="0", DownloadMode=enum.Enum("DownloadMode", ["REUSE_DATASET_IF_EXISTS"]))
    stub("peft.utils", SAFETENSORS_WEIGHTS_NAME="a.safetensors", WEIGHTS_NAME="a.bin")
    from transformers import training_args

    training_args.TrainingArguments.distributed_state = None
    from llamafactory.hparams import parser

    parser.is_torch_bf16_gpu_available = lambda: True
    for name in ("check_version", "require_version", "check_dependencies", "_set_transformers_logging"):
        if hasattr(parser, name):
            setattr(parser, name, lambda *_, **__: None)
    return parser


def ask(parser: Any, config: dict[str, Any]) -> str | None:
    """Return the error of the parser or of the Trainer."""
    environment = dict(os.environ)
    try:
        _, _, arguments, _, _ = parser.get_train_args(config)
        left = {"args": arguments}
        for stage in stages({})[1:]:
            stage(left)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return None


def main() -> None:
    """Answer questions until there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        write_deepspeed(Path(folder))
        sys.path[:0] = [*sys.argv[1:3], folder]
        os.environ["DISABLE_VERSION_CHECK"] = "1"
        answers, sys.stdout = sys.stdout, sys.stderr
        run = {"distributed": True}
        parser = prepare()
        stand_in(lambda: run["distributed"])
        from transformers.integrations import deepspeed

        for line in sys.stdin:
            question = json.loads(line)
            run["distributed"] = question["distributed"]
            deepspeed._hf_deepspeed_config_weak_ref = None
            print(json.dumps({"raised": ask(parser, question["config"])}), file=answers, flush=True)


if __name__ == "__main__":
    main()
