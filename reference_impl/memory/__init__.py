# SPDX-License-Identifier: Apache-2.0
"""The places of bytes: pinned host memory, device slots, copies in flight, the disk, and the ledger of them all.

- slab: one large piece of host memory, page-locked once; the slab supply makes it ahead of need.
- arena: hands out blocks of slabs to one mechanism, and takes them back with the event of their last copy.
- in flight: tensors that a copy still reads or writes; kept alive until its event.
- slot: a device buffer of a pool, which streamed data passes through; permanent slots stay, extra ones are temporary.
- tier: a place for the bytes of saved storages: pinned host memory, or a file on disk behind pinned staging memory.
- staging: pinned memory that copies to and from slower memory pass through.
- copiers: threads that copy between pageable memory and staging, as many at a time as cores are idle (`cores`).
- extent: a stretch of the spill file.
- ledger: counts live and peak bytes of the device and host tiers.
- region: a few lines that no signal may interrupt; signal handlers run at its end.
- live, reserved: bytes that are handed out, and bytes of all slabs.
- home: the host memory of a trained weight that is on the device only during its use (`weight_home`).

Explained in docs/activation-offloading.md and docs/optimizer-state-offloading.md.
"""
