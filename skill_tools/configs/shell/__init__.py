# SPDX-License-Identifier: Apache-2.0
"""Reads launch scripts without running them; `launch` is the entry, the rest is loaded when there is a script.

Explained in docs/design.md (decision 8).

- word, part: a piece of the script between blanks, and a stretch of it: literal text, an expansion, a command's output
- field, piece: a part of a word whose variables are expanded, and a stretch of it that knows its place
- resolved: all of a word's text is known; certain: it stands in no branch that may not run
"""
