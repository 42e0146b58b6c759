# SPDX-License-Identifier: Apache-2.0
"""A test of every entry of a list of facts: one test, with all failing entries in its message.

A test apiece would cost more to collect, distribute and report than its assertion.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def for_each(
    entries: Iterable[Any], name: Callable[[Any], object] = str
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Make a test of `check(entry)` that runs for all `entries` and lists the failing ones, each by its `name`."""

    listed = list(entries)

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            assert listed, "there is no entry to check"
            failed = []
            for entry in listed:
                try:
                    check(entry)
                except Exception as error:
                    failed.append(f"{name(entry)}: {type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(listed)}:\n" + "\n".join(failed), pytrace=False)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return decorate
