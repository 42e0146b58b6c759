# SPDX-License-Identifier: Apache-2.0
"""Parking: all training memory leaves the GPU while something else uses it, and comes back the same.

A reinforcement-learning trainer that generates, an evaluation or a weight sync needs the GPU for a while, and the
trainer's weights, gradients and optimizer states are in the way. `park` moves the bytes of their storages to one pinned
slab at the speed of the link and frees the storages under the tensors, which stay the same objects.

- storage: memory that tensors share; each one is moved once, with all its views.
- kind: `weights` (parameters and buffers), `gradients`, `states` (of optimizers), `extra` (other given tensors).

It moves nothing while training runs. Explained in docs/parking.md.
"""

from reference_impl.parking.parked import ParkedTraining, park

__all__ = ["ParkedTraining", "park"]
