# SPDX-License-Identifier: Apache-2.0
"""`offload(accelerator, model, optimizer, ...)`, for a loop of your own behind `accelerator.prepare`."""

from reference_impl.integrations.accelerate import offload

__all__ = ["offload"]
