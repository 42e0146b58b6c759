# SPDX-License-Identifier: Apache-2.0
"""Runs as a script in a process of its own: one Axolotl release's real configuration schema answers questions.

    python axolotl_process.py RELEASE_FOLDER DEPENDENCIES_FOLDER

Reads one configuration (a JSON object) a line and writes one verdict a line: `errors`, the schema's error texts, and
`warnings`, its log. pydantic, torch and every line of `axolotl.utils.schemas` are the real ones. Stand-ins replace the
schema's further imports; none of them decides a compared verdict:

- `axolotl.utils.logging`: a logger that keeps its lines; the real one asks for a process group first.
- `transformers.utils.import_utils.is_torch_npu_available` and `accelerate.utils.is_fp8_available`: False, as
  they answer on a machine without an Ascend NPU and without an FP8 engine.
- `transformers.OptimizerNames` and `SchedulerType` (read by releases up to 0.17): the names that
  `axolotl_configurations` generates, which every pinned transformers release has.
"""

import enum
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CAPABILITIES = {
    "capabilities": {
        "bf16": True, "fp8": False, "tf32": True, "n_gpu": 1, "n_node": 1, "compute_capability": "sm_90",
    },
    "env_capabilities": {"torch_version": "2.13.0"},
}  # fmt: skip
OPTIMIZERS = [
    "adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit",
    "lion_8bit",
]  # fmt: skip
# The arguments that every configuration has since they ship with Axolotl, as release 0.20 and 0.21 merge them.
BUILTIN_ARGUMENTS = {"context_parallel": "ContextParallelArgs", "expert_parallel": "ExpertParallelArgs"}


class KeepingLogger:
    """Keeps the text of each warning; everything else that is logged is dropped."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str, *values: object) -> None:
        self.warnings.append(text % values if values else text)

    warning_once = warning

    def info(self, *_anything: object) -> None: ...

    info_once = debug = info


def stand_in(name: str, **content: object) -> None:
    """Put a module with `content` where `import name` will find it; it is a package, too."""
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module


def load_schema(logger: KeepingLogger) -> Any:
    """Import the class that validates a run's configuration, and return it."""
    optimizers = enum.Enum(
        "OptimizerNames",
        {name: name for name in OPTIMIZERS} | {"ADAMW_TORCH_FUSED": "adamw_torch_fused"},
        type=str,
    )
    stand_in("axolotl.utils.logging", get_logger=lambda *_name, **_level: logger)
    stand_in("transformers", SchedulerType=enum.Enum("SchedulerType", {"COSINE": "cosine"}, type=str))
    stand_in("transformers.training_args", OptimizerNames=optimizers)
    stand_in("transformers.utils")
    stand_in("transformers.utils.import_utils", is_torch_npu_available=lambda: False)
    stand_in("accelerate")
    stand_in("accelerate.utils", is_fp8_available=lambda: False)
    integrations = Path(sys.argv[1]) / "axolotl" / "integrations"
    without_initializers(integrations)
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities

    return with_builtin_arguments(AxolotlConfigWCapabilities, integrations)


def without_initializers(base: Path) -> None:
    """Let the modules of `axolotl.integrations` be imported without their packages, which import the whole stack."""
    for folder in [base, *(path for path in base.glob("*") if path.is_dir())]:
        name = ".".join(["axolotl.integrations", *folder.relative_to(base).parts])
        stand_in(name)
        sys.modules[name].__path__ = [str(folder)]


def with_builtin_arguments(schema: Any, base: Path) -> Any:
    """Return `schema` with the arguments of the plugins that the release always loads."""
    file = base / "base.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    listed = text.partition("BUILTIN_PLUGINS = (")[2].partition(")\n")[0]
    for package, name in BUILTIN_ARGUMENTS.items():
        if f".{package}." in listed:
            arguments = vars(importlib.import_module(f"axolotl.integrations.{package}.args"))[name]
            schema = type(schema.__name__, (schema, arguments), {"__module__": __name__})
    return schema


def verdict(schema: Any, logger: KeepingLogger, configuration: dict[str, Any]) -> dict[str, list[str]]:
    """Validate one configuration; whatever the schema raises is an answer, pydantic's own error or not."""
    from pydantic import ValidationError

    logger.warnings = []
    errors: list[str] = []
    try:
        schema(**configuration, **json.loads(json.dumps(CAPABILITIES)))
    except ValidationError as error:
        errors = [one["msg"].removeprefix("Value error, ") for one in error.errors()]
    except Exception as error:
        errors = [f"{type(error).__name__}: {error}"]
    return {"errors": errors, "warnings": list(dict.fromkeys(logger.warnings))}


def main() -> None:
    sys.path[:0] = sys.argv[1:3]
    logger = KeepingLogger()
    schema = load_schema(logger)
    for line in sys.stdin:
        print(json.dumps(verdict(schema, logger, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
