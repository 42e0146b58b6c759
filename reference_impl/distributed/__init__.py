# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: engines that shard or reduce, meshes, the ranks of a host.

This room knows no optimizer, activation or weight streamer; they ask it. It says when FSDP2 reads a weight, and on
which stream, and when DDP has reduced a gradient. Which weights are waited for, and which gradients leave, only the
optimizer knows, so `optimizer.attach(model)` is the optimizer's.
Terms:

- rank: one process of a group, with one device; local ranks: those of one host, which share its memory and cores.
- gather: FSDP2 brings a module's parameters together from the shards of all ranks, before its forward and backward.
- gate: makes one gather wait until its own shards are updated.
- gathered group: the modules whose parameters FSDP2 gathers together, by one collective.
- DDP's bucket: the gradients that DDP reduces by one collective, in memory that it keeps for the whole run.
- cut: how the ranks of a mesh share each matrix of a parameter; owner: the rank that has one whole for a while.
- replica: a rank that holds the same shards as another (HSDP, DDP).

Explained in docs/distributed.md.
"""
