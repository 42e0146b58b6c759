"""Compares a release of a framework with what is recorded of it. For contributors; nothing of a release is run.

- release: the Python and YAML files of a wheel, a source archive, a folder, or of what is installed (`release_files`)
- summary: fields, flags, messages, log texts and private names of a release, with their defaults (`summary`)
- change: what one release has and another has not, or the knowledge has not (`difference`)
- quote: the words that a rule's evidence cites from a file of the release (`quotes`)
"""
