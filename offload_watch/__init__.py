# SPDX-License-Identifier: Apache-2.0
"""Watches a training program from beside it: whose the bytes on GPU and host are, against a plan.

`run` starts the program and shows the reports that its processes write. `injected/sitecustomize.py`, which Python
loads in each process of the program, waits for torch and starts an `observer`. The observer asks `owners` for the
owner of each storage and writes a sample to a file, which `report` turns into words. `inside` starts an observer for
a program that asks for one itself. No object of the program gets a hook.

The observer runs in the program's own Python, with its torch: this package imports only torch, the modules of
`reference_impl` already loaded by the program, and the ledger if no GPU counts bytes.

- owner: the purpose of bytes: weights, gradients, optimizer states, activations, or a buffer of an offloader.
- sample: the bytes of each owner in each tier at one moment.
- phase: forward, backward, update: the part of a step in which the peak was reached.

Explained in docs/watching.md.
"""
