# SPDX-License-Identifier: Apache-2.0
"""Holds the rules about scripts to Accelerate's own plugin: generated `FullyShardedDataParallelPlugin(...)`, both ways.

    python tests/judges/accelerate/plugins.py --plugins 1000 build/accelerate/1.15.0

The plugin must raise exactly when a rule with the effect `raises` fires for the script that makes it. Each release is
asked in a process of its own.
"""

import argparse
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

from fetch import EXTRAS  # noqa: E402

from skill_tools.dialects.read import read_text  # noqa: E402
from skill_tools.rules.knowledge import load_rules_yaml  # noqa: E402
from skill_tools.rules.lint import lint  # noqa: E402

TRUTHS = [None, True, False]
FIELDS: dict[str, list[object]] = {
    "fsdp_version": [None, 1, 2],
    "sharding_strategy": [None, "FULL_SHARD", "SHARD_GRAD_OP"],
    "reshard_after_forward": [*TRUTHS, "FULL_SHARD"],
    "backward_prefetch": [None, "BACKWARD_PRE", "NO_PREFETCH"],
    "state_dict_type": [None, "FULL_STATE_DICT", "LOCAL_STATE_DICT", "sharded_state_dict"],
    "auto_wrap_policy": [None, "transformer_based_wrap", "no_wrap", "WRAP_ALL"],
    "activation_checkpointing_offload": [True, False],  # by name it is refused before 1.15, None too
    "offload_params": [True],  # the file's name, which the plugin does not have
    **dict.fromkeys(
        (
            *("cpu_offload", "forward_prefetch", "use_orig_params", "sync_module_states"),
            *("activation_checkpointing", "cpu_ram_efficient_loading"),
        ),
        TRUTHS,
    ),
}


def drawn(dice: random.Random) -> dict[str, Any]:
    """Return the arguments of one plugin."""
    rarely = {"offload_params": 0.05}
    return {
        name: dice.choice(values) for name, values in FIELDS.items() if dice.random() < rarely.get(name, 0.4)
    }


def hold(seed: int, count: int) -> int:
    """Ask the release on the path about `count` plugins; print the disagreements and return how many there are."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin, __version__
    from accelerate.utils import dataclasses

    rules = {rule.id: rule for rule in load_rules_yaml() if rule.id.startswith("acc-")}
    dice, confirmed, wrong = random.Random(seed), Counter[str](), 0
    for _ in range(count):
        given = drawn(dice)
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        script = (
            "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
            f"plugin = FullyShardedDataParallelPlugin({arguments})\naccelerator = Accelerator(fsdp_plugin=plugin)\n"
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
        with (
            mock.patch.dict(os.environ, clean, clear=True),
            mock.patch.object(dataclasses, "is_cuda_available", return_value=True),
            mock.patch.object(torch.cuda, "current_device", return_value=0),
            warnings.catch_warnings(action="ignore"),
        ):
            try:
                FullyShardedDataParallelPlugin(**given)
                said = ""
            except (TypeError, ValueError, KeyError) as error:
                said = f"{type(error).__name__}: {error}"
        found = lint(
            read_text(script, "train.py"), rules=list(rules.values()), versions={"accelerate": __version__}
        )
        raising = [each.rule for each in found.findings if rules[each.rule].effect == "raises"]
        confirmed.update(raising if said else ())
        if bool(raising) is not bool(said):
            wrong += 1
            print(f"{arguments}: the plugin says {said!r}, the rules {raising}")
    print(f"accelerate {__version__}: {count} plugins, {wrong} disagreements, confirmed {dict(confirmed)}")
    return wrong


def main() -> None:
    """Hold each release in a process of its own; exit code 1 where one disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plugins", type=int, default=1000, metavar="N")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("trees", nargs="*", type=Path)
    args = parser.parse_args()
    if args.inside:
        sys.exit(min(hold(0, args.plugins), 1))
    command = [sys.executable, __file__, "--inside", "--plugins", str(args.plugins)]
    codes = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(EXTRAS)])},
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
        for tree in args.trees
    ]
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main()
