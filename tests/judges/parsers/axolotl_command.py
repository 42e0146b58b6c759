# SPDX-License-Identifier: Apache-2.0
"""`axolotl train FILE OPTIONS` of one release, from its own code, up to the validation of the configuration.

Packages that the release imports and does not need for this (torch, transformers, telemetry) are stood in for.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_REAL = (
    "axolotl.cli.config",
    "axolotl.cli.config_options",
    "axolotl.cli.utils.args",
    "axolotl.cli.utils.train",
    "axolotl.utils.dict",
    "axolotl.cli.utils.sweeps",
)
_STOOD_IN_FOR = ("axolotl", "torch", "transformers", "requests", "dotenv", "pydantic")


class _Found(Exception):
    """The configuration is complete."""


class _StandIn(ModuleType):
    """A module that has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda function: function) if name == "send_errors" else MagicMock()


class _StandsIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of Axolotl but the ones read, and the missing packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = Path(sys.argv[2])
        if name in _REAL:
            file = root.joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.partition(".")[0] in _STOOD_IN_FOR:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def _command(given: dict[str, Any]) -> Any:
    """Return the click command with the options of the release; `given` gets the parsed values."""
    import click

    args = importlib.import_module("axolotl.cli.utils.args")
    table = importlib.import_module("axolotl.cli.config_options").AXOLOTL_CONFIG_CLI_OPTIONS

    def train(context: click.Context, config: str, launcher: str, **kwargs: Any) -> None:
        given.update(options=kwargs, left=list(context.args), launcher=launcher)

    decorated: Any = click.pass_context(args.filter_none_kwargs(train))
    decorated = args.add_options_from_config_options(table)(decorated)
    decorated = click.option("--launcher", default="accelerate")(decorated)
    decorated = click.argument("config")(decorated)
    return click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        decorated
    )


def run(text: str, words: list[str], *, launcher: str) -> dict[str, Any]:
    """Return the configuration and the words that the launcher gets."""
    if not any(isinstance(each, _StandsIn) for each in sys.meta_path):
        sys.meta_path.insert(0, _StandsIn())
    config = importlib.import_module("axolotl.cli.config")
    given: dict[str, Any] = {}
    _command(given).main(["run.yaml", "--launcher", launcher, *words], standalone_mode=False)
    found: dict[str, Any] = {}

    def validate(cfg: Any, **_: Any) -> None:
        found.update(cfg)
        raise _Found

    config.validate_config = validate
    config.gpu_capabilities = lambda: (None, None)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()

        def do_cli(config_path: str, **kwargs: Any) -> None:
            try:
                config.load_cfg(file.name, **kwargs)
            except _Found:
                return

        if launcher == "python":
            do_cli(file.name, **given["options"])
        else:
            import fire

            build = importlib.import_module("axolotl.cli.utils.train").build_command
            fire.Fire(do_cli, command=build(["run.yaml"], given["options"]), name="train")
    found.pop("axolotl_config_path", None)
    return {"config": dict(found), "left": given["left"]}
