# SPDX-License-Identifier: Apache-2.0
"""A wheel's metadata beside pyproject.toml: README with links that PyPI can follow, and addresses.

The repository's address is that of the workflow which builds (`GITHUB_SERVER_URL`, `GITHUB_REPOSITORY`,
`GITHUB_SHA`): no file states it, and a fork's wheel names the fork. Built elsewhere, a wheel has no addresses, and its
README no links into the repository.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# [text](path) and ![text](path), not of another site or of a heading of the same page.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


class Addresses(MetadataHookInterface):
    """Fills `project.readme` and `project.urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Take README.md as it is, but for its links."""
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        address = f"{server}/{repository}" if server and repository else ""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = _LINK.sub(_absolute(address, os.environ.get("GITHUB_SHA", "HEAD")), text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = _urls(address) if address else {}


def _absolute(address: str, revision: str) -> Callable[[re.Match[str]], str]:
    """Return a writer of links into the repository: without an address their text, and nothing for a picture."""

    def write(link: re.Match[str]) -> str:
        picture, text, path, heading = link[1], link[2], link[3], link[4] or ""
        if not address:
            return "" if picture else text
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({address}/{kind}/{revision}/{path}{heading})"

    return write


def _urls(address: str) -> dict[str, str]:
    return {
        "Repository": address,
        "Documentation": f"{address}/tree/HEAD/docs",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
