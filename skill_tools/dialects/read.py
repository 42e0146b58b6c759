"""The one way from files, text and overrides to a `Config`.

It loads each input, finds out which framework it is for, and lets that framework's reader write it into one
draft, in the order in which the framework itself composes them. Detection is in `detect`.
"""

from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Config, Framework
from skill_tools.configs.source import Source, load
from skill_tools.dialects import detect


def read(
    inputs: Sequence[str | Path], *, overrides: Sequence[str] = (), framework: Framework | None = None
) -> Config:
    """Read files, and command line overrides on top of them, into one configuration.

    Raises `UnusableInput` when an input cannot be read, or when it is not clear which framework it is for.
    """
    return read_sources([load(path) for path in inputs], overrides=overrides, framework=framework)


def read_text(
    text: str, filename: str, *, overrides: Sequence[str] = (), framework: Framework | None = None
) -> Config:
    """Read one configuration from `text`, as if it stood in `filename`."""
    return read_sources([Source(filename, text)], overrides=overrides, framework=framework)


def read_sources(
    sources: Sequence[Source], *, overrides: Sequence[str] = (), framework: Framework | None = None
) -> Config:
    """Compose `sources` and `overrides` in the precedence of their framework."""
    if framework is not None:
        detect.check_stated(framework, sources)
    chosen = framework or detect.framework_of(sources, overrides)
    match chosen:
        case Framework.BRIDGE:
            from skill_tools.dialects.megatron.bridge_compose import compose
        case Framework.MEGATRON_LM:
            from skill_tools.dialects.megatron.lm_compose import compose
        case Framework.AXOLOTL:
            from skill_tools.dialects.axolotl.compose import compose
    return compose(sources, overrides)
