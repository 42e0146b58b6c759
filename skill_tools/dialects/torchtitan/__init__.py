# SPDX-License-Identifier: Apache-2.0
"""torchtitan: one TOML a run up to 0.2.2, options of the command line on top; from 0.3 on Python functions and options.

- job configuration: the dataclass that the TOML fills, section by section; an unknown name is refused since 0.2
- module: from 0.3 on, the Python module whose function returns the configuration (`--module llama3 --config llama3_8b`)
"""

TORCHTITAN = "torchtitan"
