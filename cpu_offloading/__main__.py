# SPDX-License-Identifier: Apache-2.0
"""`python -m cpu_offloading` is the command `offload`."""

from skill_tools.__main__ import process

if __name__ == "__main__":
    process()
