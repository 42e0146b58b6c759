"""What this package knows of training on several ranks: engines that shard or reduce, meshes, the ranks of a host.

It knows no optimizer, activation or weight: those ask it. `optimizer.attach(model)` is theirs, and only they know what
has to be waited for; what is said here is when somebody else reads a weight, and on which stream. Terms:

- rank: one process of a group, with one device; local ranks: those of one host, which share its memory and cores.
- gather: FSDP2 brings a module's parameters together from the shards of all ranks, before its forward and backward.
- gathered group: the modules whose parameters FSDP2 gathers together, by one collective.
- replica: a rank that holds the same shards as another (HSDP, DDP).

Explained in docs/distributed.md.
"""
