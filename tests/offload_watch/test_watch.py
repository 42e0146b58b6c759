# SPDX-License-Identifier: Apache-2.0
"""`offload watch` beside real programs: it names the bytes' owners, and the program notices nothing."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.bundle import root

pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
pytestmark = pytest.mark.slow  # each case is a process that loads torch

ROOT = root()
WATCH = (sys.executable, "-m", "skill_tools", "watch")
PLAIN = """
import sys, torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)])  # 8 MiB
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(4):
    model(torch.ones(1024, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", type(model).__name__, sorted(model[0]._forward_hooks), flush=True)
sys.exit(7)
"""


def call(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, env=environment(), **options
    )


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def mebibytes(line: str) -> dict[str, float]:
    """A line's values of each owner, and of the peak."""
    return {name.strip(): float(size) for name, size in re.findall(r"([a-z][a-z ()]*?) ([\d.]+) MiB", line)}


def test_a_line_at_the_end_says_whose_the_bytes_were_and_the_exit_code_is_the_program_s() -> None:
    done = call(*WATCH, "--every", "1000", "--", sys.executable, "-c", PLAIN)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "trained Linear []\n".replace("Linear", "Sequential")
    (line,) = done.stderr.splitlines()
    found = mebibytes(line)
    assert line.startswith("offload watch: 4 steps")
    assert "in backward" in line
    assert found["weights"] == found["gradients"] == 8.0
    assert 16 <= found["optimizer states"] < 16.1
    # Each layer keeps its input, 2 MiB, of which the first is also the batch.
    assert 16 <= found["activations and the rest"] < 30


def test_offloaded_states_are_on_the_host_and_the_plan_of_the_program_is_found(tmp_path: Path) -> None:
    plan = {
        "recommendation": {"option": {
            "label": "states", "time": {"step_s": 1.0},
            "memory": {"allocated_bytes": 40 * 2**20,
                       "gpu": [{"kind": "weights", "bytes": 8 * 2**20}],
                       "host_per_rank": [{"kind": "moments", "bytes": 24 * 2**20}]},
        }},
        "execute": {"optimizer": {"offload_fraction": 1.0}},
    }  # fmt: skip
    applied = f"""
import json
from cpu_offloading import apply_plan
applied = apply_plan(model, optimizer, json.loads({json.dumps(json.dumps(plan))}))
optimizer = applied.optimizer
"""
    program = PLAIN.replace("for _ in range(4)", f"{applied}for _ in range(4)")
    done = call(*WATCH, "--every", "1000", "--", sys.executable, "-c", program)
    assert done.returncode == 7, done.stderr
    line = done.stderr.splitlines()[-1]
    assert "peak" in line
    assert "(plan 40.0 MiB)" in line
    device, _, host = line.partition("; host ")
    assert mebibytes(host)["optimizer states"] >= 24  # masters and moments in fp32
    assert "(plan 24.0 MiB)" in host
    assert mebibytes(device).get("optimizer states", 0) < 24


def test_owners_have_no_more_than_the_peak() -> None:
    """Without a GPU the ledger misses the optimizer's slots for passing states."""
    words = "from cpu_offloading import HybridDeviceOptimizer\nmodel ="
    program = PLAIN.replace("model =", words, 1).replace(
        "torch.optim.AdamW(model.parameters(), foreach=False)",
        "HybridDeviceOptimizer(model.parameters(), offload_fraction=0.5)\noptimizer.attach(model)",
    )
    done = call(*WATCH, "--every", "1000", "--", sys.executable, "-c", program)
    assert done.returncode == 7, done.stderr
    device = done.stderr.splitlines()[-1].partition("; host ")[0]
    peak, owners = re.findall(r"peak ([\d.]+) MiB", device), re.findall(r"[:,] [a-z ]+ ([\d.]+) MiB", device)
    assert sum(map(float, owners)) <= float(peak[0]) + 0.05 * len(owners), device


def test_in_a_pipe_lines_come_while_it_runs() -> None:
    program = (
        PLAIN.replace("range(4)", "range(40)")
        .replace("ones(1024", "ones(8")
        .replace("optimizer.zero_grad()", "optimizer.zero_grad(); __import__('time').sleep(0.1)")
    )
    done = call(*WATCH, "--every", "0.5", "--", sys.executable, "-c", program)
    lines = done.stderr.splitlines()
    assert len(lines) > 2
    assert all(line.startswith("offload watch: ") and "\x1b" not in line for line in lines)


def on_a_terminal(command: Sequence[str], until: bytes, keys: bytes) -> tuple[bytes, int]:
    """Run `command` on a terminal of its own, type `keys` once `until` was printed; return all output and the code."""
    process, terminal = pty.fork()
    if process == 0:
        termios.tcsetwinsize(0, (24, 100))
        os.chdir(ROOT)
        os.execve(command[0], list(command), environment(TERM="xterm"))
    output, typed = b"", False
    while True:
        if not select.select([terminal], [], [], 240)[0]:
            pytest.fail(f"nothing more: {output[-500:]!r}")
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        output += part
        if not typed and until in output:
            os.write(terminal, keys)
            typed = True
    return output, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_ctrl_c_on_a_terminal_reaches_the_program_once() -> None:
    program = """
import time
try:
    print("ready", flush=True)
    time.sleep(200)
except KeyboardInterrupt:
    time.sleep(1)  # a second one would end it here
    print("saved", flush=True)
    raise SystemExit(5)
"""
    output, code = on_a_terminal([*WATCH, "--", sys.executable, "-c", program], b"ready", b"\x03")
    assert b"saved" in output
    assert code == 5
    assert output.count(b"\x1b[r") == 1  # the scrolling region is given back


def test_a_signal_that_somebody_sends_is_handed_on() -> None:
    program = "import time; print('ready', flush=True); time.sleep(200)"
    with subprocess.Popen(
        [*WATCH, "--", sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 128 + signal.SIGTERM


def test_what_python_loads_at_its_start_is_loaded_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    command = [
        *WATCH,
        "--",
        sys.executable,
        "-c",
        "import sitecustomize as s, sys; print(s.__file__, type(sys.meta_path[0]))",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env=environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    # The tool's own process prints it, too.
    assert done.stdout.splitlines()[-2:] == ["theirs", f"{tmp_path / 'sitecustomize.py'} <class 'type'>"]
    assert "no torch was seen" in done.stderr


def test_the_callback_leaves_torch_as_it_was() -> None:
    import torch
    from torch.optim import optimizer as optimizers

    import reference_impl  # noqa: F401 - which has a hook of its own
    from cpu_offloading import watch

    def hooks() -> tuple[object, ...]:
        return (
            torch.autograd.backward,
            *optimizers._global_optimizer_pre_hooks.values(),
            *optimizers._global_optimizer_post_hooks.values(),
        )

    before = hooks()
    lines: list[str] = []
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with watch(say=lines.append) as seen:
        for _ in range(2):
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
            assert hooks() != before
    assert hooks() == before
    (line,) = lines
    assert line.startswith("2 steps")
    assert seen.seen["problem"] is None


def test_bad_input_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    wrong = {
        ("watch",): "no program",
        ("watch", "--every", "0", "--", "true"): "--every 0.0",
        ("watch", "--plan", str(tmp_path / "plan.json"), "--", "true"): "predicts nothing",
        ("watch", "--plan", str(tmp_path / "none.json"), "--", "true"): "No such file",
        ("watch", "--", "/nonexistent/program"): "No such file",
    }
    for words, message in wrong.items():
        assert main(words) == 2
        assert message in capsys.readouterr().err
