# SPDX-License-Identifier: Apache-2.0
"""Python loads this in every process of a watched program: it starts the observer once torch is there.

Apart because only a folder that holds nothing else may stand on the program's path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))
# Modules that the observer may need; the program does not see the rest of their folder.
_OURS = ("offload_watch", "reference_impl", "offload_arithmetic")


class _Finder:
    """Finds our packages unless the program has its own of the name, and starts the observer behind torch's import."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a package of ours, or of torch with the observer behind it."""
        if name in _OURS:
            return PathFinder.find_spec(name) or PathFinder.find_spec(name, [_ROOT])
        if name != "torch":
            return None
        sys.meta_path.remove(_Finder)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, _Finder)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_observe(module: object) -> None:
                execute(module)  # type: ignore[arg-type]
                from offload_watch.observer import observe

                observe(os.environ["OFFLOAD_WATCH"])

            spec.loader.exec_module = execute_and_observe  # type: ignore[method-assign]
        return spec


def _hand_on() -> None:
    """Load the sitecustomize that the program would have had."""
    ours = sys.modules["sitecustomize"]
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if os.environ.get("OFFLOAD_WATCH"):
    sys.meta_path.insert(0, _Finder)
_hand_on()
