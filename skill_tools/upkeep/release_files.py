# SPDX-License-Identifier: Apache-2.0
"""Reads the text files of a release: a wheel or other zip, a tar archive, a folder, or an installed distribution.

Nothing is unpacked, imported or executed. Paths are relative to the folder that holds the package, as the evidence of
rules names them: `transformers/training_args.py`.
"""

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from skill_tools.dialects import registry
from skill_tools.errors import UnusableInput

_SUFFIXES = (".py", ".yaml", ".yml")
_MOST_BYTES = 3_000_000  # of one file; longer ones are tables
_WRAPPER = re.compile(r"[-.]")  # `deepspeed-0.19.8`: no package is called so
# Errors of zipfile and tarfile for an archive with a missing, changed, encrypted or unsupported part.
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError,
    EOFError, OSError, RuntimeError, NotImplementedError,
)  # fmt: skip
# Folders of a source tree or wheel that hold packages and are none.
_LAYOUTS = ("src", "lib", "purelib", "platlib")
_OF_SEVERAL = re.compile(r"packages/[^/]+/(?=src/)")  # one of a repository's several packages


def read_release(package: str, release: str, source: Path | None) -> dict[str, str]:
    """Return path and text of each file of `package` at `release`.

    Raises `UnusableInput` for a file that is no archive, holds a path outside itself, or holds another package.
    """
    if source is None:
        files = dict(_installed(package, release))
    elif source.is_dir():
        files = dict(_folder(source))
    elif archive := _archive(source):
        files = archive
    else:
        raise UnusableInput(
            f"{source} is {'no archive' if source.exists() else 'not there'}",
            expected="a wheel, a source archive or a folder of sources",
            attempt=f"pip download --no-deps {package}=={release}",
        )
    return _of_package(package, _without_layout(files), source)


def _of_package(package: str, files: dict[str, str], source: Path | None) -> dict[str, str]:
    """Return `files` where they hold `package`, by the name of a folder or in its own metadata."""
    wanted = package.replace("-", "_").lower()
    parts = {wanted, wanted.replace("_", ""), wanted.partition("_")[0]}
    parts |= {each.package.partition("/")[0] for each in registry.with_files() if each.name == package}
    tops = {path.partition("/")[0].lower() for path in files}
    if not files or not parts & {each.replace("-", "_") for each in tops}:
        held = ", ".join(sorted(tops)[:4]) or "no Python"
        raise UnusableInput(
            f"{source or package} holds {held}",
            expected=f"the sources of {package}",
            attempt=f"pip download --no-deps {package}",
        )
    return files


def _without_layout(files: dict[str, str]) -> dict[str, str]:
    """Remove a tag archive's first folder and `src/`, so paths begin with the package."""
    while files:
        tops = {path.partition("/")[0] for path in files}
        (top, *others) = sorted(tops)
        if others or not _WRAPPER.search(top):
            break
        files = {path.partition("/")[2]: text for path, text in files.items() if "/" in path}
    return {in_package(path): text for path, text in files.items()}


def in_package(path: str) -> str:
    """Return a path of a repository as it is in its wheel, without the folders that hold packages."""
    head, _, rest = _OF_SEVERAL.sub("", path).partition("/")
    return rest if head in _LAYOUTS and "/" in rest else path


def _folder(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*")):
        is_text = path.suffix in _SUFFIXES and path.is_file() and not path.is_symlink()
        if is_text and path.stat().st_size <= _MOST_BYTES:
            yield path.relative_to(root).as_posix(), _text(path.read_bytes())


def _archive(source: Path) -> dict[str, str] | None:
    """Return the files of a zip or tar archive, None for any other file."""
    try:
        if zipfile.is_zipfile(source):
            return dict(_zip(source))
        if source.is_file() and tarfile.is_tarfile(source):
            return dict(_tar(source))
    except _DAMAGED as error:
        raise UnusableInput(
            f"{source} is damaged, encrypted or packed in another way: {error}",
            expected="a whole archive",
            attempt="to download it again",
        ) from None
    return None


def _zip(source: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(source) as archive:
        for entry in archive.infolist():
            _require_inside(entry.filename, source)
            if entry.filename.endswith(_SUFFIXES) and entry.file_size <= _MOST_BYTES:
                yield entry.filename, _text(archive.read(entry))


def _tar(source: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(source) as archive:
        for entry in archive:
            _require_inside(entry.name, source)
            if entry.isfile() and entry.name.endswith(_SUFFIXES) and entry.size <= _MOST_BYTES:
                content = archive.extractfile(entry)
                yield entry.name, _text(content.read() if content else b"")


def _require_inside(name: str, source: Path) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise UnusableInput(
            f"{source} holds the path {name!r}, which lies outside it",
            expected="paths inside the archive",
            attempt="the archive that the framework's authors publish",
        )


def _installed(package: str, release: str) -> Iterator[tuple[str, str]]:
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or found.version.partition("+")[0] != release:
        raise UnusableInput(
            f"{package} {release} is not installed{f', {found.version} is' if found else ''}",
            expected="a wheel, a source archive or a folder of sources",
            attempt=f"pip download --no-deps {package}=={release}, then the file that it fetched",
        )
    for entry in found.files or ():
        path = Path(str(entry.locate()))
        if path.suffix in _SUFFIXES and path.is_file() and path.stat().st_size <= _MOST_BYTES:
            yield str(entry), _text(path.read_bytes())


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
