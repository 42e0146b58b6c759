# SPDX-License-Identifier: Apache-2.0
"""The gradients of a step: where they are until it uses them, their stand-ins, and the decision over all.

- to leave: a gradient goes to the host before `step()`; a stand-in takes its place.
- to stand: a gradient stays on its parameter, as torch leaves it, and the update reads it there.
- stand-in: a tensor on `param.grad` for a gradient that has left. It answers norms and scaling, and is dropped with it.
- in use: describes a gradient that stands while a begun update still reads it.

Explained in docs/optimizer-offloading.md.
"""
