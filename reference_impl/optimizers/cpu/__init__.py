# SPDX-License-Identifier: Apache-2.0
"""The share whose state is kept and updated on the CPU.

Explained in docs/optimizer-offloading.md. The path of a gradient: `gradients.mover` (D2H) → `workers` (when) →
`update` (how) → `publish` (H2D); `share` puts them together and `step` keeps the books. Terms:

- member: one parameter as the optimizer knows it; piece: a contiguous part of a member in one bucket.
- bucket: the flat host tensors of some pieces, updated and copied as one.
- staging: a bucket's pinned buffer in the parameter's dtype; the gradient is copied into it, the new weight out of
  it.
- master: the fp32 weight that the update reads and writes.
- deadline: the place in the forward where a bucket's first weight is needed.
- task: a part of a bucket for one call of the kernel on one thread; block: a part of a task that fits a core's cache.
- offload a gradient: start its copy to staging; until `arrival` it is in flight.
- pending: said of a member whose new weight no reader has waited for yet.
"""
