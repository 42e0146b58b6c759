# SPDX-License-Identifier: Apache-2.0
"""Asks one DeepSpeed release: reads a configuration a line from standard input, writes the error a line, or nothing.

    python witness.py TREE EXTRAS < configurations > errors

It runs in a process of its own, because a process imports one release. Nothing is stubbed: with DS_ACCELERATOR=cpu a
release imports beside torch alone. The world is one rank.
"""

import contextlib
import io
import json
import logging
import os
import sys


def main(tree: str, extras: str) -> None:
    """Answer for every line; an error is its type and the first line of its text."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path[:0] = [tree]
    sys.path.append(extras)
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.config import DeepSpeedConfig
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            error = _error(DeepSpeedConfig, json.loads(line))
        print(json.dumps(error), flush=False)


def _error(load: type, configuration: dict[str, object]) -> str:
    try:
        load(configuration)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
