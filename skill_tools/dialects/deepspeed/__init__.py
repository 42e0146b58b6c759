# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: its JSON, alone or as the section of another framework's configuration.

- section: a DeepSpeed configuration inside another, inline or as a file that is named there; its keys are canonical
  under `deepspeed.` wherever they stand
- python_script: the dict that a script gives `deepspeed.initialize`
"""

DEEPSPEED = "deepspeed"
EMBEDDED = (DEEPSPEED,)  # dialects with sections in a draft
MAKES_ENGINE = "deepspeed.initialize"  # called by a script without a trainer
