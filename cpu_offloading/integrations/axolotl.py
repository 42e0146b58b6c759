# SPDX-License-Identifier: Apache-2.0
"""`OffloadPlugin`, which Axolotl's `plugins:` names, and its keys."""

from reference_impl.integrations.axolotl import OffloadArgs, OffloadPlugin

__all__ = ["OffloadArgs", "OffloadPlugin"]
