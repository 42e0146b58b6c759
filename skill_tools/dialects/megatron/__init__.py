# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM and Megatron Bridge: two dialects that train with Megatron Core.

They share run, layout and candidates; `core` is their common part, `bridge` and `lm` are the two objects.

- recipe: a Python function that builds a whole Bridge configuration; files and overrides lie over it
- saved run: the `run_config.yaml` that Bridge writes, with everything in it
- launch script: the shell script that starts the training; it is followed, never run
"""

BRIDGE = "megatron-bridge"
LM = "megatron-lm"
