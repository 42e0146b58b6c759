"""Where bytes live: pinned host slabs, device rings, in-flight copies, and the ledger that counts them."""
