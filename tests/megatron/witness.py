# SPDX-License-Identifier: Apache-2.0
"""Builds megatron-core's own config objects and answers with their errors; runs in a process of its own.

`judge.py` starts it with one release of megatron-core, and nothing of this project, on its path. It writes one line of
JSON with the release and whether it has the command line's code, then answers each line

    {"class": "TransformerConfig", "fields": {..}}     or     {"arguments": [..], "environment": {..}}

with `{"text": ..}`: the text of the error, or null when nothing was raised. An exception without a text is answered
with the line of source that raised it, as a traceback shows it; a question that takes longer than a minute with `late`.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import os
import signal
import sys
import traceback
import typing
import warnings

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "uint8"}
PRETENDED_TRANSFORMER_ENGINE = "2.12.0"
MOST_S_FOR_AN_ANSWER = 60.0  # megatron-core 0.19.2 never answers some command lines


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    signal.signal(signal.SIGALRM, stop)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    # Releases from 0.18 on are written for Python 3.12; they use nothing else of it here.
    typing.override = getattr(typing, "override", lambda method: method)
    import megatron.core

    facts = {"version": megatron.core.__version__, "has_arguments": has_arguments()}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, MOST_S_FOR_AN_ANSWER)
        try:
            if "class" in asked:
                text = raised(build, asked["class"], asked["fields"])
            else:
                text = raised(parse, asked["arguments"], asked["environment"])
            answer = {"text": text}
        except Late:
            answer = {"text": None, "late": True}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


class Late(BaseException):
    """A question takes longer than any answer may; no error of the release."""


def stop(number: int, frame: object) -> None:
    raise Late


def has_arguments() -> bool:
    """Whether the tree has the training package too; wheels from PyPI have not."""
    return importlib.util.find_spec("megatron.training") is not None


def raised(function: typing.Callable[..., None], *arguments: typing.Any) -> str | None:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            function(*arguments)
    except SystemExit:
        return printed.getvalue().strip().splitlines()[-1]
    except Exception as error:
        raised_at = traceback.extract_tb(error.__traceback__)[-1].line
        return str(error) or raised_at
    return None


def build(config_class: str, fields: dict[str, typing.Any]) -> None:
    import torch
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {"TransformerConfig": TransformerConfig, "OptimizerConfig": OptimizerConfig}
    classes[config_class](
        **{
            name: getattr(torch, DTYPES[value]) if name.endswith("_dtype") else value
            for name, value in fields.items()
        }
    )


def parse(arguments: list[str], environment: dict[str, str]) -> None:
    """Begin as a training script: parse, validate, build both configs."""
    import megatron.core.utils
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
    from packaging.version import Version

    megatron.core.utils._te_version = Version(PRETENDED_TRANSFORMER_ENGINE)
    os.environ.pop("NVTE_CPU_OFFLOAD_V1", None)
    os.environ.update(environment, RANK="0", WORLD_SIZE="8")
    sys.argv = ["pretrain_gpt.py", *arguments]
    parsed = parse_args()
    validate_args(parsed, {})
    core_transformer_config_from_args(parsed)
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    OptimizerConfig(**{name: value for name, value in vars(parsed).items() if name in names})


if __name__ == "__main__":
    main()
