# SPDX-License-Identifier: Apache-2.0
"""The depth of `make test-transformers`; an ordinary test run asks each release a hundred times."""

from hypothesis import settings

settings.register_profile("transformers", max_examples=5_000)
