"""A plain PyTorch loop, planned with the mechanisms of `reference_impl`."""
