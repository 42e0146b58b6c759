"""The card: what this project claims, checked against its evidence and rendered into the documents.

`card.yaml` holds the claims. These modules load it, hold it to its schema and to the rules and keys it names,
and write its tables into Markdown. They know no configuration and no verdict.
"""
