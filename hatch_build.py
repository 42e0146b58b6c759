"""Renders the rules' pages into the wheel, because the repository does not keep them."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RulePages(BuildHookInterface):
    """Builds the pages in a temporary folder and includes it as `skill_tools/_bundle/docs/rules`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Render the pages; an editable install has the checkout, where `offload card pages` builds them."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from skill_tools.reports.rule_pages import write_rule_pages

        self._folder = tempfile.TemporaryDirectory()
        write_rule_pages(Path(self._folder.name))
        build_data["force_include"][self._folder.name] = "skill_tools/_bundle/docs/rules"
