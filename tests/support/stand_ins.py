# SPDX-License-Identifier: Apache-2.0
"""Imports a framework's own modules from a folder without its training libraries installed.

Every library is stood in for by a mock but those among `real`, so that a check of settings runs as it is and answers
alike wherever it runs.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock


class _Anything(type):
    """Classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Mock(ModuleType):
    """A module with a mock for each name, or a class that takes any arguments, so that others may derive from it."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[0].isupper() and not name.isupper()
        body = {"__init__": _takes_anything, "__class_getitem__": classmethod(lambda cls, _: cls)}
        value = _Anything(name, (), body) if is_class else MagicMock(name=name)
        setattr(self, name, value)
        return value


def _takes_anything(self: object, *_: object, **__: object) -> None:
    """Begin an object that is never used."""


class _StandIns(MetaPathFinder, Loader):
    """The first finder: it takes whatever is neither the framework's own, nor Python's, nor `real`."""

    def __init__(self, own: Sequence[str], real: Sequence[str], mocked: Sequence[str]) -> None:
        self._kept = {*own, *real, *sys.stdlib_module_names}
        self._mocked = tuple(mocked)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Take a module, or leave it to the finders behind."""
        is_mocked = fullname in self._mocked or fullname.startswith(
            tuple(f"{name}." for name in self._mocked)
        )
        is_kept = fullname.partition(".")[0] in self._kept and not is_mocked
        return None if is_kept else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the mock."""
        return _Mock(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


class Release:
    """While it is open, `own` packages come from `folder`; their modules and the mocks are put by for the next time.

    `mocked` are modules of the framework itself that are stood in for, `given` take the place of some by their names.
    Import `real` modules before.
    """

    def __init__(
        self,
        folder: Path,
        *,
        own: Sequence[str],
        real: Sequence[str] = (),
        mocked: Sequence[str] = (),
        given: Mapping[str, ModuleType] | None = None,
    ) -> None:
        self._folder, self._own = str(folder), own
        self._finder = _StandIns(own, real, mocked)
        self._modules: dict[str, ModuleType] = dict(given or {})
        self._before: dict[str, ModuleType] = {}

    def __enter__(self) -> None:
        self._before = self._taken_out()
        sys.modules.update(self._modules)
        sys.path.insert(0, self._folder)
        sys.meta_path.insert(0, self._finder)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self._finder)
        sys.path.remove(self._folder)
        self._modules = self._taken_out()
        sys.modules.update(self._before)

    def _taken_out(self) -> dict[str, ModuleType]:
        names = [
            name
            for name, module in sys.modules.items()
            if isinstance(module, _Mock) or name.partition(".")[0] in self._own
        ]
        return {name: sys.modules.pop(name) for name in names}
