# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: engines that shard or reduce, meshes, the ranks of a host.

This room knows no optimizer, activation or weight streamer; they ask it. It finds the moment and the stream
of FSDP2's reads of a weight, and the end of DDP's reduction of a gradient. Only the optimizer knows the weights to wait
for and the gradients that leave, so `optimizer.attach(model)` is the optimizer's.
Terms:

- rank: one process of a group, with one device; local ranks: those of one host, which share its memory and cores.
- gather: FSDP2 brings a module's parameters together from the shards of all ranks, before its forward and backward.
- gate: makes one gather wait until its own shards are updated.
- gathered group: the modules whose parameters FSDP2 gathers together, by one collective.
- DDP's bucket: the gradients of one reducing collective, in DDP's memory for the whole run.
- cut: the division of each matrix of a parameter among the ranks of a mesh; owner: the rank that has one whole for a
  while.
- replica: a rank that holds the same shards as another (HSDP, DDP).

Explained in docs/distributed.md.
"""
