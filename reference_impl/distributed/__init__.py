"""What training on several ranks adds: engines that shard or reduce, meshes, the ranks of a host.

This room knows no optimizer, activation or weight streamer; they ask it. It says when FSDP2 reads a weight, and on
which stream. What has to be waited for only the optimizer knows, so `optimizer.attach(model)` is the optimizer's.
Terms:

- rank: one process of a group, with one device; local ranks: those of one host, which share its memory and cores.
- gather: FSDP2 brings a module's parameters together from the shards of all ranks, before its forward and backward.
- gathered group: the modules whose parameters FSDP2 gathers together, by one collective.
- replica: a rank that holds the same shards as another (HSDP, DDP).

Explained in docs/distributed.md.
"""
