# SPDX-License-Identifier: Apache-2.0
"""Lays out an agent's installation: the skill without tests, benchmarks, evals and contributors' pages.

    python3 .ci/skill_bundle.py            # build/skill/cpu-offloading and build/skill/cpu-offloading.zip
    python3 .ci/skill_bundle.py FOLDER     # the same there

It takes files that git knows. The YAML behind the compiled `index/` stays away too: no command of a user reads it.
The zip is 3 % smaller where zopflipy is installed, as the extra `test` does.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

try:
    from zopfli import ZipFile
except ImportError:
    ZipFile = None

ROOT = Path(__file__).resolve().parent.parent
TAKEN = (
    "SKILL.md", "skill-card.md", "card.yaml", "LICENSE", "README.md", "BENCHMARK.md", "SECURITY.md",
    ".claude-plugin", "cpu_offloading", "docs", "examples", "offload_arithmetic", "offload_watch", "reference_impl",
    "schema", "skill_tools",
    # Files of `pip install '.[reference]'`.
    "pyproject.toml", "constraints.txt",
)  # fmt: skip
LEFT_OUT = (
    # Sources of the index: each section's file or folder of YAML.
    *(
        f"skill_tools/knowledge/{section}{suffix}"
        for compiled in (ROOT / "skill_tools" / "knowledge" / "index").iterdir()
        for section in compiled.stem.split("+")
        for suffix in ("", ".yaml")
    ),
    *(
        f"skill_tools/knowledge/{name}"
        for name in ("coverage", "upstream.yaml", "reviewed.yaml", "families.yaml")
    ),
    # The check and rendering of a checkout: `offload card`, which says that this is none.
    *(
        f"skill_tools/card/{name}.py"
        for name in ("blocks", "configuration", "documents", "measurements", "references")
    ),
    "skill_tools/reports/checkout.py",
    "skill_tools/reports/rule_folder.py",
    # The maintainers' comparison of releases: `offload knowledge`, which says so.
    "skill_tools/upkeep",
    "skill_tools/rules/index.py",
    # Of that YAML; the commands' output has the other schemas.
    *(
        f"schema/{name}.schema.json"
        for name in (
            "card",
            "card.base",
            "rules",
            "keys",
            "messages",
            "fixes",
            "numbers",
            "symptoms",
            "quiet",
            "residency",
            "code",
            "changes",
            "offloads",
            "neighbours",
            "builds",
        )
    ),
    # For type checkers of a program that installs the packages, which takes the wheel.
    *(
        f"{package}/py.typed"
        for package in (
            "cpu_offloading",
            "offload_arithmetic",
            "offload_watch",
            "reference_impl",
            "skill_tools",
        )
    ),
    # Pictures are for people; the text beside them says the same.
    "docs/figures",
    # How it is built, for contributors.
    "docs/design.md",
    # All keys at once; `explain KEY` prints one in a few lines.
    "docs/configuration.md",
)
# Of the card a plan reads the decisions; maintainers render and check the documents with the rest.
READ_OF_THE_CARD = ("title", "decisions")
# Of pyproject.toml, the part that installs the bundle; the rest is of a checkout: checks, tests, PyPI's page.
READ_BY_PIP = ("[build-system]", "[project", "[tool.hatch.version]", "[tool.hatch.build")
OF_A_CHECKOUT = re.compile(
    r'^#.*?\n|^(?:docs|card|test) = \[(?:[^\n]*\]\n|\n.*?^\]\n)|, "readme", "urls"', re.MULTILINE | re.DOTALL
)
# The evidence of a page; agents may quote docs/measured.md, which has the card's rows.
EVIDENCE = re.compile(r"^(## (?:Measured|How it is shown)\n).*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ELSEWHERE = "\nIn this page of the repository; the rows to quote are in [measured](measured.md).\n\n"
HINT = "; 3 % fewer with `pip install zopflipy`"
SPLIT_BYTES = 5_000
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def is_within(path: str, folders: tuple[str, ...]) -> bool:
    """Return whether `path` is one of `folders` or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def shortened(page: Path) -> str:
    """Return a page's text for the bundle: without evidence, and with words alone where a link's file stayed away."""

    def kept(link: re.Match[str]) -> str:
        words, address = link.groups()
        is_here = ":" in address or (page.parent / address).exists()
        return link[0] if is_here else words

    text = page.read_text()
    return LINK.sub(kept, EVIDENCE.sub(rf"\1{ELSEWHERE}", text) if page.parent.name == "docs" else text)


def read_of_the_card(text: str) -> str:
    """Return the sections of card.yaml that a command of the bundle reads, as they are written there."""
    sections = re.split(r"^(?=\w+:)", text, flags=re.MULTILINE)
    return "".join(section for section in sections if section.partition(":")[0] in READ_OF_THE_CARD)


def read_by_pip(text: str) -> str:
    """Return the tables of pyproject.toml that install the bundle, without comments and a checkout's packages."""
    tables = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return OF_A_CHECKOUT.sub("", "".join(table for table in tables if table.startswith(READ_BY_PIP)))


def opened(archive: Path) -> zipfile.ZipFile:
    """Return a zip file to write to, with the hardest deflate that is installed."""
    if ZipFile is None:
        return zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
    return ZipFile(archive, "w", zipfile.ZIP_DEFLATED, iterations=20)


def options(path: Path) -> dict[str, bool]:
    """Return the options of `opened(..).write` for a file.

    Blocks with codes of their own win 6 of 2,000 kB in twice the time; those of small files would win 1 kB in as much.
    """
    return {} if ZipFile is None else {"block_splitting": path.stat().st_size >= SPLIT_BYTES}


def bundle(target: Path) -> None:
    """Write the bundle to `target`, which is made anew."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    if target.exists():
        shutil.rmtree(target)
    for path in filter(None, listed.stdout.split("\0")):
        if is_within(path, TAKEN) and not is_within(path, LEFT_OUT):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target / path)
    for page in target.rglob("*.md"):
        page.write_text(shortened(page))
    card = target / "card.yaml"
    card.write_text(read_of_the_card(card.read_text()))
    project = target / "pyproject.toml"
    project.write_text(read_by_pip(project.read_text()))


def zipped(target: Path) -> Path:
    """Write the bundle in `target` as a zip file beside it, whose path is returned."""
    archive = Path(f"{target}.zip")
    # Without entries for folders, which `shutil.make_archive` writes.
    with opened(archive) as written:
        for path in sorted(path for path in target.rglob("*") if path.is_file()):
            written.write(path, path.relative_to(target.parent), **options(path))
    return archive


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "skill") / "cpu-offloading"
    bundle(folder)
    archive = zipped(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    print(f"{folder}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    print(f"{archive}: {archive.stat().st_size:,} bytes{HINT if ZipFile is None else ''}")
