# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel: a YAML recipe whose classes are named by `_target_`, over FSDP2, Megatron-FSDP or DDP.

- recipe: the class that trains; all read the `distributed` section alike, except diffusion's, which have `fsdp` or
  `ddp` instead
- strategy: FSDP2, Megatron-FSDP or DDP; the rest of the section must be fields of its configuration
"""

NEMO_AUTOMODEL = "nemo-automodel"
