# SPDX-License-Identifier: Apache-2.0
"""Memory snapshots of torch: the file that `torch.cuda.memory._dump_snapshot` writes, and the owners at its peak.

- snapshot: the allocator's blocks at one moment, and the events before it, each with the Python frames it came from.
- trace: the events of one device, oldest first; where `max_entries` was reached, the newest of them.
- holder: an owner of bytes and the line of the user's code that allocated them.

Nothing of a file is executed: `pickled` reads the opcodes of plain containers and refuses all others.
"""
