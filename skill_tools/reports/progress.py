"""Progress of long work on stderr: a bar where somebody watches a terminal, else one line a part.

rich is imported only for the bar.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with the name of the part at work, the steps done and the steps in all.
OnStep = Callable[[str, int, int], None]


@contextmanager
def progress() -> Iterator[OnStep]:
    """Yield what to call after every step."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def _lines() -> OnStep:
    last: list[str] = []

    def on_step(name: str, done: int, total: int) -> None:
        if last != [name]:
            last[:] = [name]
            print(f"{done / total:4.0%} {name}", file=sys.stderr, flush=True)

    return on_step
