# SPDX-License-Identifier: Apache-2.0
"""Compares a release of a framework with its record. For contributors; nothing of a release is run.

- release: the Python and YAML files of a wheel, a source archive, a folder, or an installed release (`release_files`)
- summary: fields, flags, messages, log texts and private names of a release, with their defaults (`summary`)
- change: a name of one release that another, or the knowledge, lacks (`difference`)
- quote: the words that a rule's evidence cites from a file of the release (`quotes`)
- report: all of it for one release, as `offload knowledge diff` prints it (`report`)
"""
