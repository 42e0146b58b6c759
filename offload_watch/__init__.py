"""Watches a training program from beside it: whose the bytes on GPU and host are, against a plan.

`run` starts the program and shows what it says of itself. `injected/sitecustomize.py`, which Python loads in each
process of the program, waits for torch and starts an `observer`; that asks `owners` whose each storage is and writes a
sample to a file, which `report` turns into words. `inside` is the same for a program that asks for it. No object of the
program gets a hook.

The observer runs in the program's own Python, with its torch: this package imports nothing but torch, and of
`reference_impl` what the program itself has loaded, or its ledger where no GPU counts bytes.

- owner: what bytes are for: weights, gradients, optimizer states, activations, or a buffer of an offloader.
- sample: the bytes of each owner in each tier at one moment.
- phase: forward, backward, update: the part of a step in which the peak was reached.

Explained in docs/watching.md.
"""
