# SPDX-License-Identifier: Apache-2.0
"""Renders the results of the linter, the planner and the diagnosis, for people and programs; decides nothing.

Glossary:
    report: all that one lint call found: findings, undecided rules, unusable inputs.
    concise, markdown, json: text for a terminal or an agent, text for an issue, and the documents of schema/.
    document: a result as plain data in the shape of its JSON schema.
    rule page: the Markdown page of one rule, which `offload explain ID` prints.
    rendered: written from data by a command, never by hand; built: rendered and not kept in git.
"""
