# SPDX-License-Identifier: Apache-2.0
"""ms-swift: arguments of `swift` and `megatron` in scripts, YAML or JSON, and the files that they name.

- program: `swift` (transformers' Trainer, DeepSpeed, FSDP) or `megatron` (Megatron Core), each with its own arguments
- preset: a DeepSpeed or FSDP file that ms-swift ships; its content is a known fact (`knowledge/keys/ms_swift.yaml`)
"""

MS_SWIFT = "ms-swift"
