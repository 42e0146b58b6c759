# SPDX-License-Identifier: Apache-2.0
"""`OffloadCallback`, for Lightning's Trainer."""

from reference_impl.integrations.lightning import OffloadCallback

__all__ = ["OffloadCallback"]
