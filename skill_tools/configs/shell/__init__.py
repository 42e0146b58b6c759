# SPDX-License-Identifier: Apache-2.0
"""Reads launch scripts without running them; `launch` is the entry, the rest is loaded when there is a script.

Explained in docs/design.md (decision 8).

- word, part: a piece of the script between blanks, and a stretch of it: literal text, an expansion, a command's output
- field, piece: a part of a word with expanded variables, and a stretch of it with its place - resolved: all of a word's
  text is known; certain: no branch around it may be skipped
"""
