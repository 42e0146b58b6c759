# SPDX-License-Identifier: Apache-2.0
"""Asks the planner, `skill_tools`: it runs as a process, not imported here, and its answer is a plan.

So there is one search and one model of step time, and a JSON document passes between the packages. Explained in
docs/fitting.md, "Why the planner is a process".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Plan = dict[str, Any]
_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 120


class RefusedPlanError(ValueError):
    """The planner has no plan, and says why."""


class Planner:
    """Plans one model and batch; `described` is a model profile, or a Hugging Face config without one.

    Args:
        described: the result of `trace_profile.profile_batch`, or the entries of a config.json.
        sequences, tokens: of the batch.
        host_bytes: the bytes of host memory that mechanisms may take.
        pinned_bytes: the bytes of it that may be page-locked; None means the limit found here by `offload probe`.
        allow_other_numerics: whether a plan may round optimizer states.
        gradients_wait: whether gradients wait for their copies; on the CPU twin copies are synchronous.
        muon: whether Muon updates the matrices.
    """

    def __init__(
        self,
        described: Mapping[str, Any],
        *,
        sequences: int,
        tokens: int,
        host_bytes: int,
        pinned_bytes: int | None = None,
        allow_other_numerics: bool = False,
        gradients_wait: bool = True,
        muon: bool = False,
    ) -> None:
        self.host_bytes = host_bytes
        self._run = [f"seq_length={tokens}", f"micro_batch_size={sequences}", *["optimizer=muon"] * muon]
        self.pinned_bytes = pinned_bytes
        flags = {"--allow-other-numerics": allow_other_numerics, "--gradients-at-once": not gradients_wait}
        self._flags = [flag for flag, is_so in flags.items() if is_so]
        self._is_traced = "steps" in described
        self._text = json.dumps(described)

    def plan(self, tensor_bytes: int, *, without: frozenset[str] = frozenset()) -> Plan:
        """Return the plan for at most `tensor_bytes` on the device, without the mechanisms in `without`.

        Raises RefusedPlanError where nothing fits.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(self._text, encoding="utf-8")
            words = ["--trace", str(path)] if self._is_traced else [str(path)]
            words += ["--framework", "pytorch", "--format", "json", *self._flags]
            words += ["--tensor-memory", f"{tensor_bytes}bytes", "--host-memory", f"{self.host_bytes}bytes"]
            if self.pinned_bytes is not None:
                words += ["--pinned-memory", f"{self.pinned_bytes}bytes"]
            for mechanism in sorted(without):
                words += ["--without", mechanism]
            return _ask([*words, "--overrides", *self._run])


def formula_parameters(config: Mapping[str, Any]) -> int | None:
    """Return how many parameters the planner's formula gives a model of this config.json; None where it has none."""
    endless = 2**60
    try:
        plan = Planner(config, sequences=1, tokens=1024, host_bytes=endless).plan(endless)
    except RefusedPlanError:
        return None
    found: int = plan["model"]["parameters"]
    return found


def _ask(words: list[str]) -> Plan:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "skill_tools", "plan", *words],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode != 0:
        raise RefusedPlanError(_refusal(done))
    return complete(json.loads(done.stdout))


def _refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the planner's last line, with the ways from its answer in place of a reference to them."""
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    problem, found, rest = said[-1].removeprefix("offload: ").partition("one of the ways above")
    if not found:
        return problem
    ways = json.loads(done.stdout)["ways"]
    return (
        problem + ", or ".join(" and ".join(each["label"] for each in way["changes"]) for way in ways) + rest
    )


def complete(plan: Plan) -> Plan:
    """Return `plan` with masters in fp32 whatever leaves, so that no plan trains to other weights than another.

    Trained layers that stream have such masters by themselves.
    """
    if "trained_layers" in plan["execute"]:
        return plan
    return plan | {"execute": {"optimizer": {"offload_fraction": 0.0}} | plan["execute"]}
