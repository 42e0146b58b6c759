# SPDX-License-Identifier: Apache-2.0
"""Offloading in a trainer by one line: each adapter here knows one framework and imports it only when it is used.

- `wanted`: the offloads that a user asks for, by a plan or by options, checked before anything is touched.
- `offloading`: the handle that puts it on the model of a trainer and takes it off again; it knows no framework.
- `transformers`: `offload(trainer, ...)` and `OffloadCallback`, for Transformers and TRL, with PEFT or without.
- `accelerate`: `offload(accelerator, model, optimizer)`, for a loop of your own, after `prepare`.
- `lightning`: `OffloadCallback`, for Lightning's Trainer; Fabric needs none.
- `axolotl`: `OffloadPlugin`, with keys of its own in Axolotl's YAML.

Explained in docs/trainers.md.
"""

from reference_impl.integrations.offloading import Offloading, OffloadReport
from reference_impl.integrations.wanted import Wanted

__all__ = ["OffloadReport", "Offloading", "Wanted"]
