# SPDX-License-Identifier: Apache-2.0
"""`offload(trainer, ...)` and `offload_callback(...)`, for Transformers and TRL."""

from reference_impl.integrations.transformers import offload, offload_callback

__all__ = ["offload", "offload_callback"]
