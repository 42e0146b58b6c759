# SPDX-License-Identifier: Apache-2.0
"""The depth of `make test-axolotl`; an ordinary test run asks each release a hundred times."""

from hypothesis import settings

settings.register_profile("axolotl", max_examples=10_000)
