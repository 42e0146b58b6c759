# SPDX-License-Identifier: Apache-2.0
"""The walls of docs/design.md: imports run downwards, files are small, and skill_tools stays harmless."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from for_each import for_each

from skill_tools.dialects import registry

ROOT = Path(__file__).resolve().parent.parent
SKILL_TOOLS = sorted((ROOT / "skill_tools").rglob("*.py"))
REFERENCE_IMPL = sorted((ROOT / "reference_impl").rglob("*.py"))
GROUND = sorted((ROOT / "offload_arithmetic").rglob("*.py"))
WATCH = sorted((ROOT / "offload_watch").rglob("*.py"))
PACKAGES = [*SKILL_TOOLS, *REFERENCE_IMPL, *GROUND, *WATCH]

# Each room with the floor it stands on; a file imports from its own room or from lower floors only.
SKILL_FLOORS = {
    "__main__": 9, "completion": 8, "commands": 8, "reports": 7, "upkeep": 7, "planning": 6,
    "diagnosis": 6, "snapshots": 6, "rules": 5, "card": 5,
    "dialects": 4, "configs": 3, "knowledge": 2, "units": 2, "terminal": 2, "bundle": 1, "errors": 1,
    "nearest": 1, "started": 0,
}  # fmt: skip
REFERENCE_FLOORS = {
    "integrations": 8, "fitting": 7, "verification": 6, "parking": 6, "trained_layers": 5,
    "sequences": 5,
    "optimizers": 4, "activations": 4, "weights": 4, "distributed": 3, "memory": 2, "device": 1,
}  # fmt: skip

BANNED_MODULES = {
    "torch",
    "numpy",
    "subprocess",
    "socket",
    "urllib.request",
    "http",
    "requests",
    "pickle",
    "ctypes",
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
LONGEST_MODULE = 500
MOST_MODULES_OF_A_FOLDER = 25
MOST_TERMS = 25
# Of a thousand words of comments and docstrings, in the rooms that hold to it.
MOST_WHAT = 1
NAMES_OBJECTS = {
    "integrations", "fitting", "verification", "parking", "trained_layers", "sequences", "optimizers", "activations",
    "weights", "distributed", "memory", "device", "configs", "planning", "reports", "rules", "dialects", "diagnosis",
    "commands", "upkeep", "snapshots", "card", "knowledge",
}  # fmt: skip
# A shorter module with a single importer says in a sentence of its docstring why it stands alone.
SHORTEST_MODULE = 60
STANDS_ALONE = re.compile(r"(?:^|[.:]\s+|\n)Apart because \S")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[1]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, also inside functions."""
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} imports relatively"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def climbing(paths: list[Path], package: str, floors: dict[str, int]) -> list[str]:
    """Imports that go up, or sideways into another room."""
    problems = []
    for path in paths:
        here = room(path)
        for module in imported(path):
            parts = module.split(".")
            if parts[0] != package or len(parts) < 2 or parts[1] not in floors or here == "__init__":
                continue
            if parts[1] != here and floors[parts[1]] >= floors[here]:
                problems.append(f"{relative(path)} imports {module}")
    return problems


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in SKILL_TOOLS} - {"__init__"} == set(SKILL_FLOORS)
    assert {room(path) for path in REFERENCE_IMPL} - {"__init__"} <= set(REFERENCE_FLOORS)


def test_imports_run_downwards() -> None:
    assert not climbing(SKILL_TOOLS, "skill_tools", SKILL_FLOORS)
    assert not climbing(REFERENCE_IMPL, "reference_impl", REFERENCE_FLOORS)


def test_the_packages_do_not_know_each_other() -> None:
    problems = [
        relative(path) for path in SKILL_TOOLS if any(m.startswith("reference_impl") for m in imported(path))
    ]
    problems += [
        relative(path) for path in REFERENCE_IMPL if any(m.startswith("skill_tools") for m in imported(path))
    ]
    assert not problems


def test_the_ground_stands_on_nothing() -> None:
    problems = [
        f"{relative(path)} imports {module}"
        for path in GROUND
        for module in imported(path)
        if module.split(".")[0] not in sys.stdlib_module_names | {"offload_arithmetic"}
    ]
    assert not problems


def test_what_runs_inside_a_watched_program_brings_nothing_along() -> None:
    """Torch is the program's own; `reference_impl` is looked up where the program has loaded it."""
    known = sys.stdlib_module_names | {"offload_watch", "torch"}
    problems = [
        f"{relative(path)} imports {module}"
        for path in WATCH
        for module in imported(path)
        if module.split(".")[0] not in known
    ]
    assert not problems


def constants(paths: list[Path]) -> dict[tuple[str, int | float], str]:
    """The numbers named in capitals, by name and value, each with one of its modules."""
    found = {}
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            literal = ast.unparse(node.value)
            if node.targets[0].id.isupper() and re.fullmatch(r"[\d.()*+<\- ]*\d[\d.()*+<\- ]*", literal):
                found[node.targets[0].id.strip("_"), eval(literal)] = relative(path)
    return found


def test_no_number_is_written_in_both_packages() -> None:
    """Common facts are in `offload_arithmetic`."""
    ours, theirs = constants(SKILL_TOOLS), constants(REFERENCE_IMPL)
    twice = [
        f"{name} = {value}: {ours[name, value]}, {theirs[name, value]}"
        for name, value in ours.keys() & theirs
    ]
    assert len(ours) > 50
    assert len(theirs) > 50
    assert not twice, listed("numbers are copies; try offload_arithmetic/sizes.py", twice)


@for_each(SKILL_TOOLS, relative)
def test_skill_tools_reaches_for_nothing_dangerous(path: Path) -> None:
    dangerous = {
        m for m in imported(path) for banned in BANNED_MODULES if m == banned or m.startswith(f"{banned}.")
    }
    calls = [node for node in nodes(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    dangerous |= {call.func.id for call in calls if call.func.id in BANNED_CALLS}  # type: ignore[attr-defined]
    dynamic = [call for call in calls if call.func.id in {"getattr", "setattr"}]  # type: ignore[attr-defined]
    assert not dangerous
    assert all(isinstance(call.args[1], ast.Constant) for call in dynamic), "getattr with a computed name"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """The modules of the packages that each module imports, packages' `__init__` included."""
    paths = {module_name(path): path for path in PACKAGES}
    graph = {}
    for module, path in paths.items():
        names = {name if name in paths else name.rpartition(".")[0] for name in imported(path)}
        graph[module] = names & paths.keys() - {module}
    return graph


def importers() -> Counter[str]:
    """How many modules of the packages import each module."""
    return Counter(name for names in import_graph().values() for name in names)


def named_modules(path: Path) -> set[str]:
    """Texts of a file that may name imported modules."""
    return {
        node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules imported by `start`, and the modules imported by these."""
    found: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - found
        found |= new
        pending += new
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Each import of a module that reaches the importing one again."""
    reach = {module: reached(graph, module) for module in graph}
    return [
        f"{module} imports {other}"
        for module, names in graph.items()
        for other in names
        if module in reach[other]
    ]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions, under `TYPE_CHECKING` and by name count: a reader follows them all the same."""
    graph = import_graph()
    for path in PACKAGES:
        graph[module_name(path)] |= named_modules(path) & graph.keys() - {module_name(path)}
    found = circles(graph)
    assert not found, listed(
        "imports in circles; try moving the idea that both need to where it belongs", found
    )


def test_a_circle_is_told_with_all_its_imports() -> None:
    """Two circles, and a module that leads from one to the other."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"f"}, "f": {"e"}}
    assert sorted(circles(graph)) == [
        *("a imports b", "b imports c", "c imports a"),
        *("e imports f", "f imports e"),
    ]


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_module_is_long() -> None:
    long = [f"{relative(path)}: {length(path)} lines" for path in PACKAGES if length(path) > LONGEST_MODULE]
    assert not long, listed(f"over {LONGEST_MODULE} lines; try two ideas in two modules", long)


def test_the_glossary_can_be_learnt() -> None:
    """A term of one room is defined in that room's `__init__.py`."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("\n## Glossary\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    terms = [term for row in rows if not row.startswith("-") for term in row.split(", ")]
    assert 10 < len(terms) <= MOST_TERMS, terms


def prose(path: Path) -> str:
    """The comments and docstrings of a file."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(re.findall(r'""".*?"""|(?<=\s)# [^\n]*', text, re.DOTALL))


def test_prose_names_the_object() -> None:
    """A clause with `what` stands where the noun should. Some are questions that a module answers."""
    rooms: dict[str, list[str]] = {}
    for path in PACKAGES:
        if room(path) in NAMES_OBJECTS:
            rooms.setdefault(room(path), []).append(prose(path))
    counts = {
        each: (len(re.findall(r"\bwhat\b", text, re.IGNORECASE)), len(text.split()))
        for each, texts in rooms.items()
        for text in ["\n".join(texts)]
    }
    assert counts.keys() == NAMES_OBJECTS
    vague = [
        f"{each}: {count} times in {words} words"
        for each, (count, words) in counts.items()
        if count * 1000 > MOST_WHAT * words
    ]
    assert not vague, listed(f"say `what` over {MOST_WHAT} times in 1,000 words; try the noun", vague)


def test_no_folder_has_many_modules() -> None:
    counts = Counter(path.parent for path in PACKAGES if path.name != "__init__.py")
    full = [
        f"{relative(folder)}: {count} modules"
        for folder, count in counts.items()
        if count > MOST_MODULES_OF_A_FOLDER
    ]
    assert not full, listed(f"over {MOST_MODULES_OF_A_FOLDER} modules; try a room of its own", full)


def test_no_module_is_short_and_used_once_without_a_reason() -> None:
    counts = importers()
    alone = [
        f"{relative(path)}: {length(path)} lines"
        for path in PACKAGES
        if length(path) < SHORTEST_MODULE
        and counts[module_name(path)] == 1
        and path.name != "__init__.py"
        and not STANDS_ALONE.search(ast.get_docstring(nodes(path)[0]) or "")
    ]
    advice = f"under {SHORTEST_MODULE} lines with one importer; try to merge it, or say 'Apart because ...'"
    assert not alone, listed(advice, alone)


def listed(title: str, offenders: list[str]) -> str:
    return "\n  ".join([f"{len(offenders)} {title}:", *sorted(offenders)])


@for_each(PACKAGES, relative)
def test_a_file_says_why_it_exists(path: Path) -> None:
    assert ast.get_docstring(nodes(path)[0]), "no module docstring"


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    command = f"{code}; import sys; print(' '.join(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(output.stdout.splitlines()[-1].split())


# A framework that a file of texts may name all the same, with the reason.
NAMED_ALL_THE_SAME = {
    "diagnosis/memory.py": {"PyTorch"},  # the library's own words in a log
    "snapshots/snapshot.py": {"deepspeed"},  # a folder of its files, in the frames of an allocation
    "commands/verify.py": {"pytorch"},  # a command to copy in the help
    # The rendered page's introduction and its distributions.
    "card/configuration.py": {"Megatron Bridge", "Megatron", "megatron"},
    "commands/lint.py": {"megatron"},  # a distribution, as an example of --target in the help
    "commands/plan_request.py": {"megatron"},  # the same
    "rules/versions.py": {"megatron"},  # the same, in an error
    "commands/trace.py": {"transformers"},  # the library that a trace imports
    "planning/model/traces.py": {"transformers"},  # the library that a trace was made with
    "reports/checkout.py": {"pytorch"},  # the card's column of our own classes
}
COMMON_WORDS = {"lightning", "fsdp2"}  # a connection of machines, and a sharding used by several frameworks
FRAMEWORK = re.compile(
    "|".join(
        ["megatron(?:.?bridge|.?lm)?", r"\btrl\b"]
        + [rf"\b{name.replace('-', '.?')}\b" for name in sorted(set(registry.names()) - COMMON_WORDS)]
    ),
    re.IGNORECASE,
)


def named_frameworks(path: Path) -> set[str]:
    """Every framework named in a file's code: in a text other than a docstring, or in a name."""
    tree = nodes(path)[0]
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words.append(node.value)
        elif isinstance(node, ast.Name | ast.Attribute):
            words.append(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            words.append(node.name)
    return {found for word in words for found in FRAMEWORK.findall(word)}


@for_each([path for path in SKILL_TOOLS if room(path) != "dialects"], relative)
def test_only_a_dialect_knows_its_framework(path: Path) -> None:
    """A framework's differences are asked of its dialect (`dialects/base.py`)."""
    allowed = NAMED_ALL_THE_SAME.get(str(path.relative_to(ROOT / "skill_tools")), set())
    assert named_frameworks(path) == allowed


def test_help_loads_nothing_heavy() -> None:
    code = "from skill_tools.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    loaded = loaded_by(f"exec({code!r})")
    heavy = {
        "yaml",
        "json",
        "packaging",
        "jsonschema",
        "rich",
        "torch",
        "dataclasses",
        "skill_tools.commands.lint",
    }
    assert not loaded & heavy


def test_lint_loads_neither_torch_nor_what_it_does_not_need() -> None:
    bare = loaded_by("pass")
    loaded = loaded_by("import skill_tools.commands.lint") - bare
    assert not loaded & {"torch", "numpy", "jsonschema", "packaging", "rich", "markdown_it", "reference_impl"}


def test_a_lint_loads_the_mechanics_of_one_dialect_alone() -> None:
    """The others are asked for evidence only, and a plan's parts of its own are not loaded either."""
    lint = "from skill_tools.__main__ import main; main(['lint', 'examples/broken_bridge.yaml'])"
    loaded = {module for module in loaded_by(lint) if module.startswith("skill_tools.dialects.")}
    mechanics = ("_compose", ".compose", ".run", ".candidates", ".patch", ".parameters", ".layout", "_recipe")
    assert {module for module in loaded if module.endswith(mechanics)} == {
        "skill_tools.dialects.megatron.bridge_compose"
    }
    stated = loaded_by("from skill_tools.dialects import registry; registry.named('axolotl')")
    assert not any("megatron" in module or "pytorch" in module for module in stated)
