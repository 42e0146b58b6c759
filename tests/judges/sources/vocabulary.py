# SPDX-License-Identifier: Apache-2.0
"""Writes the names that trainers accept, from their own parsers or fields, for knowledge/vocabulary/.

    python tests/judges/sources/vocabulary.py NAME    one of the modules beside it
    python tests/judges/sources/vocabulary.py sd_scripts|openrlhf programs    which programs have an option

Every release in build/ that the judge asks is read; a name of any of them is one.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from source_parts import Sources

ROOT = Path(__file__).parents[3]
COMMON = "musubi_tuner.training.parser_common"


def musubi(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each training program with each of its options."""
    sources = Sources(folder / "src", real=("torch",))
    for path in sorted((folder / "src" / "musubi_tuner").glob("*_train*.py")):
        module = f"musubi_tuner.{path.stem}"
        names = sources.names(module)
        own = [name for name in names if name.endswith("_setup_parser")]
        parser = sources.take(*((COMMON, "setup_parser_common") if own else (module, "setup_parser")))()
        for name in own:
            parser = sources.take(module, name)(parser) or parser
        yield from ((path.stem, option) for action in parser._actions for option in action.option_strings)


def sd_scripts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each training program with each of its options."""
    sources = Sources(folder, real=("torch",))
    for path in [*sorted(folder.glob("*train*.py")), folder / "fine_tune.py"]:
        if "setup_parser" in sources.names(path.stem):
            parser = sources.take(path.stem, "setup_parser")()
            yield from ((path.stem, option) for action in parser._actions for option in action.option_strings)


def openrlhf(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each training program with each of its options."""
    module = importlib.import_module("openrlhf")
    witness = module.Witness(folder)
    for program in module.PROGRAMS:
        yield from ((program, option) for option in witness.options(program))


def slime(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield its one program with each option added to Megatron's, and SGLang's option for plans."""
    yield "train", "--sglang-mem-fraction-static"
    yield from (("train", option) for option in importlib.import_module("slime").Witness(folder).options())


def mind_speed(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield its programs' options that Megatron does not have."""
    yield from (
        ("train", option) for option in importlib.import_module("mind_speed").Witness(folder).options()
    )


def radix_miles(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield its one program with each option added to Megatron's, and others' options read by rules."""
    own = importlib.import_module("radix_miles").Witness(folder).options()
    fields = Sources(folder).path("miles.backends.fsdp_utils.arguments")
    classes = (
        [each for each in ast.parse(fields.read_text()).body if isinstance(each, ast.ClassDef)]
        if fields
        else []
    )
    names = [
        ast.unparse(each.target) for one in classes for each in one.body if isinstance(each, ast.AnnAssign)
    ]
    own += [f"--{name.replace('_', '-')}" for name in names if "fsdp" in name]
    yield from (("train", option) for option in ("--sglang-mem-fraction-static", *own))


def onetrainer(folder: Path) -> Iterator[str]:
    """Yield the fields of its configuration, and the three that `__migration_10` takes from older files."""
    yield from ("gradient_checkpointing", "enable_activation_offloading", "layer_offload_fraction")
    witness = importlib.import_module("onetrainer").Witness(folder)
    pending = [("", witness.defaults())]
    while pending:
        path, fields = pending.pop()
        for name, value in fields.items():
            yield f"{path}{name}"
            if isinstance(value, dict) and value:
                pending.append((f"{path}{name}.", value))
            elif isinstance(value, dict):
                yield f"{path}{name}.*"


def sky_rl(folder: Path) -> Iterator[str]:
    """Yield the fields of its dataclasses."""
    yield from importlib.import_module("sky_rl").Witness(folder).names()


def a_real(folder: Path) -> Iterator[str]:
    """Yield the fields of its dataclasses."""
    yield from importlib.import_module("a_real").Witness(folder).names()


def simple_tuner(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield its one program with each option, and each other name that its file may have."""
    yield from (
        ("train", option) for option in importlib.import_module("simple_tuner").Witness(folder).options()
    )


def ai_toolkit(folder: Path) -> Iterator[str]:
    """Yield the names that the configuration classes of three sections ask for."""
    yield "network"
    source = (folder / "toolkit/config_modules.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        section = {"ModelConfig": "model", "NetworkConfig": "network", "TrainConfig": "train"}.get(
            getattr(node, "name", "")
        )
        for name in re.findall(r"kwargs\.get\(\s*['\"](\w+)['\"]", ast.unparse(node)) if section else ():
            yield f"{section}.{name}"
            if re.search(r"kwargs|params|paths|config$|^lorm$|preservation", name):
                yield f"{section}.{name}.*"


sys.path.append(str(ROOT / "build" / "parsers_of_trainers"))
FIELDS = {
    "onetrainer": onetrainer,
    "ai_toolkit": ai_toolkit,
    "sky_rl": sky_rl,
    "a_real": a_real,
}  # of files, or of `a.b=c`


def main() -> None:
    """Print the file."""
    name = sys.argv[1]
    module = importlib.import_module(name)
    folders = [ROOT / "build" / module.NAME / release for release in module.RELEASES]
    if name in FIELDS:
        folders += [main] if (main := ROOT / "build" / module.NAME / "main").is_dir() else []
        fields = FIELDS[name]
        print(f"# Names of {module.NAME}'s configuration.\n#")
        print(f"# Source: its own classes, at {' and '.join(module.RELEASES)}.")
        print("# Written by tests/judges/sources/vocabulary.py.\n")
        print(*sorted({field for folder in folders for field in fields(folder)}), sep="\n")
        return
    options = {
        "musubi": musubi,
        "sd_scripts": sd_scripts,
        "openrlhf": openrlhf,
        "slime": slime,
        "radix_miles": radix_miles,
        "mind_speed": mind_speed,
        "simple_tuner": simple_tuner,
    }[name]
    programs: dict[str, set[str]] = {}
    for program, option in (each for folder in folders for each in options(folder)):
        if option.startswith("--"):
            programs.setdefault(option, set()).add(program)
    if sys.argv[2:] == ["programs"]:
        print_programs(module, programs)
        return
    found = programs.keys()
    print(f"# Options of {module.NAME}'s training programs, each of which has some of them.")
    print("#")
    print(
        f"# Source: the parsers of its training programs, at {', '.join(f'v{each}' for each in module.RELEASES)}."
    )
    print("# Written by tests/judges/sources/vocabulary.py.")
    print(
        *(["\nprogram"] if name not in ("slime", "radix_miles", "mind_speed", "simple_tuner") else [""]),
        *sorted(found),
        sep="\n",
    )


def print_programs(module: Any, programs: dict[str, set[str]]) -> None:
    """Print the options missing in some programs, each before the programs with it."""
    all_of_them = set.union(*programs.values())
    print(f"# Options of {module.NAME} that only some of its programs have, each before these.\n#")
    print(
        f"# Source: the parsers of its training programs, at {', '.join(f'v{each}' for each in module.RELEASES)}."
    )
    print("# Written by tests/judges/sources/vocabulary.py.\n")
    for option, those in sorted(programs.items()):
        if those != all_of_them:
            print(option, *sorted(those))


if __name__ == "__main__":
    main()
