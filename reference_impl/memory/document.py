# SPDX-License-Identifier: Apache-2.0
"""A JSON document that a user names: read, or refused with the expected document and the way to make it."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path, *, expected: str, attempt: str) -> Any:
    """Return the document in the file at `path`.

    Raises ValueError for a file without JSON, and OSError for an unreadable one. Both name the `expected` document
    and the `attempt` that makes it.
    """
    advice = f"expected {expected}; try {attempt}"
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(error.errno, f"cannot be read ({error.strerror}); {advice}", str(path)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON document ({type(error).__name__}: {error}); {advice}") from error
