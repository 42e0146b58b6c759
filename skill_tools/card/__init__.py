# SPDX-License-Identifier: Apache-2.0
"""The card: the claims of this project, checked against its evidence and rendered into the documents.

`card.yaml` holds the claims. These modules load it, hold it to its schema and to the rules and keys it names, and
write its tables into Markdown. They know no configuration and no finding. See docs/measured.md and CONTRIBUTING.md.

Glossary:
    claim: an entry of `validation_status`: a quote at a commit of an upstream, or measured rows.
    row, setting, baseline: one measurement, its hardware and workload, and the row without offload beside it.
    block: the part of a hand-written page between two markers that is rendered from the card or from a command.
    problem: one line on something named by a document or the card that is missing or differs.
"""
