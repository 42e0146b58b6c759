# SPDX-License-Identifier: Apache-2.0
"""Looks at the built site in a browser: widths, contrast, headings, alternative texts, errors, and foreign requests.

    python3 .ci/site/check.py build/site [PAGE ...]

Needs playwright and a chromium (`CHROMIUM`, by default the one on the path). Three widths, light and dark. It exits
with 1 if it finds anything. Contrast is that of WCAG 2.2: 4.5, or 3 for large text.
"""

import functools
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = (390, 1024, 1440)
PAGES = (
    "",
    "planner/",
    "out-of-memory/",
    "watching/",
    "choosing/",
    "models/",
    "api/",
    "rules/",
    "configuration/",
    "faq/",
)
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


def look(page: Page, address: str) -> list[str]:
    """Return what is wrong with a page as it is shown now."""
    found: list[str] = []
    page.on(
        "console",
        lambda message: found.append(f"console: {message.text}") if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: found.append(f"error: {error}"))
    page.on(
        "request", lambda one: None if one.url.startswith(address[:21]) else found.append(f"asks {one.url}")
    )
    page.goto(address, wait_until="load")
    return found + list(page.evaluate(LOOK))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each file that is fetched."""


def main(site: Path, pages: tuple[str, ...]) -> int:
    """Serve the site to a browser and print what is wrong with each page."""
    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root, problems = f"http://127.0.0.1:{server.server_port}/", 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"))
        for theme in ("light", "dark"):
            for width in WIDTHS:
                context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
                for name in pages:
                    page = context.new_page()
                    for problem in look(page, root + name):
                        problems += 1
                        print(f"{name or 'home'} {width} {theme}: {problem}")
                    page.close()
                context.close()
        browser.close()
    print(f"{len(pages)} pages, {len(WIDTHS)} widths, light and dark: {problems} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), tuple(sys.argv[2:]) or PAGES))
