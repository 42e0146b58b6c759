# SPDX-License-Identifier: Apache-2.0
"""Runs torchtune's own recipes up to their first step, without torch: a process that answers one question a line.

    python torchtune_witness.py build/judges/torchtune/0.6.1 build/judges/torchtune/dependencies

A question is `{"recipe": .., "config": {..}, "world": 8}`. The answer is the recipe's error, if any, and
which keys at the top of the configuration it asked for. The recipe's file is executed as it stands; OmegaConf is real,
and so is torchtune's `ParallelDims`. Everything else imported by it is an object that takes any call.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

STUBBED = frozenset(
    {"torch", "torchtune", "torchao", "tqdm", "lm_eval", "torchdata", "PIL", "ray", "vllm", "numpy"}
)

GIVE_PAIRS = frozenset({"load_state_dict", "load_from_full_model_state_dict"})


class Anything:
    """An object that takes any call, has any attribute, and holds nothing."""

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        pass

    def __call__(self, *_arguments: Any, **_keywords: Any) -> "Anything":
        return Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = Anything()
        if name == "linear_loss":
            made = False
        elif name in GIVE_PAIRS:
            made = lambda *_arguments, **_keywords: (Anything(), Anything())  # noqa: E731
        setattr(self, name, made)
        return made

    def __getitem__(self, _key: Any) -> "Anything":
        return Anything()

    def __class_getitem__(cls, _key: Any) -> type:
        return cls

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def __contains__(self, _key: Any) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> "Anything":
        return self

    def __exit__(self, *_error: Any) -> None:
        return None

    def _calculated(self, *_other: Any) -> "Anything":
        return Anything()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _calculated
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __or__ = __ror__ = __matmul__ = _calculated

    def _compared(self, _other: Any) -> bool:
        return False

    __lt__ = __gt__ = __le__ = __ge__ = _compared


class Interface:
    """The base class of recipes."""


class Stub(ModuleType):
    """A module that has any name: in capitals a text, with one in front a class, else an object."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("RecipeInterface"):
            made: Any = Interface
        elif name in GIVE_PAIRS:
            made = getattr(Anything(), name)
        elif name.isupper():
            made = name.lower()
        else:
            made = type(name, (Anything,), {}) if name[:1].isupper() else Anything()
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for each module of `STUBBED`."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Device(Anything):
    """A device as the recipes ask for it."""

    def __init__(self, name: str) -> None:
        self.type, self.index = name.partition(":")[0], 0


class World:
    """The machine, as the recipes see it: set before each question."""

    size = 1
    distributed = False


def parallel_dims(release: Path) -> type:
    """Return the release's own class of parallel sizes, taken out of its module; an empty one where it has none."""
    source = release / "torchtune" / "training" / "_distributed.py"
    if source.is_file():
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == "ParallelDims":
                names: dict[str, Any] = {**vars(typing), **vars(functools), "dataclass": dataclass}
                names |= {name: Anything() for name in ("DeviceMesh", "logger", "init_device_mesh", "torch")}
                exec(compile(ast.Module([node], []), str(source), "exec"), names)
                made: type = names["ParallelDims"]
                made.build_mesh = lambda self, device_type: Mesh()  # type: ignore[attr-defined]
                return made
    return Anything


class Mesh(Anything):
    """A device mesh; a part of it has a size."""

    def __getitem__(self, _key: Any) -> "Mesh":
        return Mesh()

    def size(self, *_dimension: Any) -> int:
        return 1

    def get_local_rank(self, *_dimension: Any) -> int:
        return 0


def prepare(release: Path) -> None:
    """Give the stubs the values that the recipes compare or unpack."""
    torch, config, training, utils = (
        importlib.import_module(name)
        for name in ("torch", "torchtune.config", "torchtune.training", "torchtune.utils")
    )
    half = torch.float16
    config.parse = lambda main: main
    training.get_dtype = lambda dtype=None, device=None: half if dtype == "fp16" else torch.bfloat16
    training.is_distributed = lambda: World.distributed
    training.ParallelDims = parallel_dims(release)
    training.VALID_BACKENDS_FOR_MEMORY_STATS = utils.VALID_BACKENDS_FOR_MEMORY_STATS = ("cuda", "xpu", "npu")
    importlib.import_module("torchtune.training._distributed").ParallelDims = training.ParallelDims
    importlib.import_module("torchtune.training.quantization").get_quantizer_mode = lambda _quantizer: (
        "8da4w-qat"
    )
    utils.torch_version_ge = lambda _version: True
    for module in (training, utils):
        module.get_world_size_and_rank = lambda: (World.size, 0)
        module.get_device = lambda device: Device(device)
        module.is_distributed = training.is_distributed
    torch.__version__ = "2.9.0"


class Recipe:
    """One recipe's file, executed."""

    def __init__(self, path: Path) -> None:
        self.names: dict[str, Any] = {"__name__": "recipe", "__file__": str(path)}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), self.names)
        for made in list(self.names.values()):
            if isinstance(made, type) and issubclass(made, Interface) and made is not Interface:
                self._shorten(made)

    def _shorten(self, recipe: type) -> None:
        """Take out of a recipe the lines after its checks."""
        for name in ("train", "cleanup", "save_checkpoint"):
            setattr(recipe, name, lambda self, *_arguments, **_keywords: None)
        for name in ("_setup_lr_scheduler", "_setup_profiler"):
            setattr(recipe, name, lambda self, *_arguments, **_keywords: Anything())
        data = getattr(recipe, "_setup_data", None)
        if data is not None:
            returned = str(getattr(data, "__annotations__", {}).get("return", "")).lower()
            pair = "tuple" in returned
            recipe._setup_data = (  # type: ignore[attr-defined]
                lambda self, *_arguments, **_keywords: (Anything(), Anything()) if pair else Anything()
            )

    def run(self, configuration: Any) -> None:
        self.names["recipe_main"](configuration)


def watched(configuration: dict[str, Any], read: set[str]) -> Any:
    """Return OmegaConf's configuration; it notes the names asked of its root."""
    from omegaconf import DictConfig, OmegaConf

    class Watched(DictConfig):
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                read.add(name)
            return super().__getattr__(name)

        def get(self, name: Any, default_value: Any = None) -> Any:
            read.add(str(name))
            return super().get(name, default_value)

    return Watched(OmegaConf.create(configuration))


def answered(release: Path, recipes: dict[str, Recipe], question: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's error and the keys that it read."""
    name = question["recipe"]
    path = release / "recipes" / f"{name}.py"
    if not path.is_file():
        return {"absent": True}
    if name not in recipes:
        recipes[name] = Recipe(path)
    World.size, World.distributed = question["world"], name.endswith("_distributed")
    read: set[str] = set()
    raised = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            recipes[name].run(watched(question["config"], read))
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    return {"raised": raised, "read": sorted(read), "warned": [str(each.message) for each in warned]}


def main() -> None:
    """Answer questions until there are no more."""
    release = Path(sys.argv[1])
    sys.path.insert(0, sys.argv[2])
    sys.meta_path.insert(0, Finder())
    prepare(release)
    recipes: dict[str, Recipe] = {}
    for line in sys.stdin:
        print(json.dumps(answered(release, recipes, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
