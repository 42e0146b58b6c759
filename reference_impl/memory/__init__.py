"""Where bytes are: pinned host memory, device slots, copies in flight, the disk, and the ledger that counts them.

- slab: one large piece of host memory, page-locked once; made ahead by the slab supply.
- arena: hands out blocks of slabs to one mechanism, and takes them back with the event of their last copy.
- in flight: what a copy still reads or writes; kept alive until its event.
- slot: one of a ring of fixed device buffers that streamed data passes through.
- tier: a place for the bytes of saved storages: pinned host memory, or a file on disk behind pinned staging memory.
- staging: pinned memory that copies to and from slower memory pass through.
- extent: a stretch of the spill file.
- ledger: counts live and peak bytes of the device and host tiers.
- region: a few lines that no signal may cut in two; handlers of signals run at its end.
- live, reserved: bytes that are handed out, and bytes of all slabs.

Explained in docs/activation-offloading.md and docs/optimizer-state-offloading.md.
"""
