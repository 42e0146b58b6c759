"""Finds and fills the rendered blocks of a Markdown file.

`<!-- card:NAME -->` to `<!-- /card -->` holds one of the card's tables, `<!-- run: WORDS -->` to
`<!-- /run -->` the real output of one command of the tool; WORDS may end in `| head -n N`. Everything outside
the blocks is written by hand and left as it is.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence

Execute = Callable[[Sequence[str]], str]

_CARD = re.compile(
    r"^<!-- card:(?P<name>[a-z-]+) -->\n(?P<body>.*?)^<!-- /card -->$", re.MULTILINE | re.DOTALL
)
_RUN = re.compile(r"^<!-- run: (?P<words>[^\n]+) -->\n(?P<body>.*?)^<!-- /run -->$", re.MULTILINE | re.DOTALL)


def fill(text: str, tables: Mapping[str, str], execute: Execute) -> str:
    """Return `text` with each block's body replaced; raises `KeyError` where no table has the block's name.

    `execute` takes a command's words, without the program's name, and returns what it prints.
    """

    def table(block: re.Match[str]) -> str:
        return f"<!-- card:{block['name']} -->\n{tables[block['name']].rstrip()}\n<!-- /card -->"

    def output(block: re.Match[str]) -> str:
        printed = _printed(block["words"], execute)
        fence = "````" if "```" in printed else "```"
        session = f"{fence}console\n$ python3 skill_tools {block['words']}\n{printed}\n{fence}"
        return f"<!-- run: {block['words']} -->\n{session}\n<!-- /run -->"

    return _RUN.sub(output, _CARD.sub(table, text))


def _printed(words: str, execute: Execute) -> str:
    """Return what the command prints, cut where the words end in `| head -n N`."""
    command, cut, lines = words.partition(" | head -n ")
    printed = execute(shlex.split(command)).rstrip()
    return "\n".join(printed.splitlines()[: int(lines)]) if cut else printed


def has_blocks(text: str) -> bool:
    """Tell whether anything in `text` is rendered."""
    return _CARD.search(text) is not None or _RUN.search(text) is not None
