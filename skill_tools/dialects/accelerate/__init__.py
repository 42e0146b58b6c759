"""Accelerate: its configuration file, and the options of `accelerate launch` on top of it.

- section: what the file and the launcher's options say; its keys are canonical under `accelerate.` wherever they stand
- active: said of the section of the file that the launcher reads: the one of its distributed type, or of its flag
"""

ACCELERATE = "accelerate"
EMBEDDED = (ACCELERATE, "deepspeed")  # what a draft embeds that may hold such a section
