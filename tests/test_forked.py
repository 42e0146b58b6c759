# SPDX-License-Identifier: Apache-2.0
"""A program in a forked process ends as one from the command line does."""

import subprocess
import sys
from pathlib import Path

import forked
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
START = """
import atexit, os, signal, sys, threading, time

class Held:
    def __del__(self):
        print("taken down", flush=True)

held = Held()
atexit.register(print, "at exit", flush=True)
print(__name__, *sys.argv[1:], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise OSError('its own error')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("threading.Thread(target=lambda: (time.sleep(0.3), print('waited for'))).start()", 0),
        ("atexit.register(os.abort)", -6),
    ],
)
def test_it_ends_as_from_the_command_line(tmp_path: Path, end: str, code: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(START + end)
    found = forked.run(str(program), "word", timeout_s=20)
    done = subprocess.run([sys.executable, program, "word"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (done.returncode, done.stdout)
    assert found.returncode == code
    assert found.stderr.splitlines()[-1:] == done.stderr.splitlines()[-1:]
