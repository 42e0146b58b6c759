# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs in processes forked from one that has imported torch.

To import it takes 4 s of a core. In all else they are like programs that are started from the command line, up to the
end of the interpreter: a program is `__main__`, and behind it threads are waited for and the rest is taken down.
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

# The packages of this checkout, if they are not installed, and pytest's folders.
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "faults")]
# Each process imports the modules of this one's main module, which is pytest's.
_IMPORTED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "reference_impl",
]


class Ended(NamedTuple):
    """How a program has ended, and its output."""

    returncode: int
    stdout: str
    stderr: str


@cache
def forks():
    """Return the context that starts processes, as `multiprocessing` does, once the one to fork from runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    before = dict(os.environ)
    # Read when torch is imported.
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(FOLDERS))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def launches(patch):
    """Have `reference_impl.distributed.launch` fork its ranks as well, as long as `patch` holds."""
    start_method = SimpleNamespace(get_context=lambda _method: forks())
    patch.setattr("reference_impl.distributed.launch.multiprocessing", start_method)


def start(program, words, stdout, stderr, **environment):
    """Start `program WORDS...`; it prints to `stdout` and `stderr`, each the path of a file or a connection."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = forks().Process(
        target=_run, args=(str(program), [*map(str, words)], environment, stdout, stderr)
    )
    process.start()
    return process


def run(program, *words, timeout_s, **environment):
    """Run `program WORDS...` and return how it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        process = start(program, words, *printed, **environment)
        try:
            process.join(timeout_s)
            said = [path.read_text() for path in printed]
            assert process.exitcode is not None, f"not done after {timeout_s} s\n{said[1][-4000:]}"
            return Ended(process.exitcode, *said)
        finally:
            process.kill()
            process.join()


def _run(program, words, environment, stdout, stderr):
    """Be the program's process."""
    # A session of its own, so that whoever ends it can end its own processes.
    os.setsid()
    for stream, where in ((1, stdout), (2, stderr)):
        if isinstance(where, Path):
            with where.open("a") as file:
                os.dup2(file.fileno(), stream)
        else:
            os.dup2(where.fileno(), stream)
            where.close()
    os.environ.clear()
    os.environ.update(environment)
    # Python reads it as it starts.
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(file=2)
    # As in the foreground: a program that a shell starts in the background ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes of the program are started as this Python starts them.
    multiprocessing.set_start_method(None, force=True)
    # Modules that have been imported by now are no garbage; to look through it takes a second at the end alone.
    gc.freeze()
    # With the folder of the program, as Python does.
    sys.path.insert(0, str(Path(program).parent))
    sys.argv = [program, *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = program
    try:
        exec(compile(Path(program).read_text(), program, "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        # Python keeps the frames of the last error too.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    # `multiprocessing` would leave at once.
    ctypes.pythonapi.Py_Exit(code)
