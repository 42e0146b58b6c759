# SPDX-License-Identifier: Apache-2.0
"""Readers: YAML, JSON, launch scripts and Python recipes become keys and values, each with its file, line and column.

A dialect decides the files that its framework reads, and their order; docs/design.md follows one value through the
readers.

- source: one input: its text and the language of the text; it is parsed once
- spelling: a key as a framework's users write it (`model.num_layers`, `--num-layers`)
- canonical key: its one name in `knowledge/keys.yaml` (`num_layers`), which rules and plans read
- setting: a value of a canonical key, with the spelling and the place that gave it
- draft: a configuration in the making, the last writer wins; it becomes a `Config`
- unresolved, `UNREADABLE`: set in the input, but to a value that only the running script or framework knows
- vocabulary: all names that a framework accepts, to detect misspelt ones
"""
