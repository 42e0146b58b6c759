# SPDX-License-Identifier: Apache-2.0
"""Scripts that give Lightning's Trainer or Fabric a strategy, and our reader's values of them.

A script is the only form that is read: the file and the command line of a LightningCLI are not.
"""

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.lightning.python_script import compose

Answer = dict[str, Any]
ZERO = "zero_optimization"
NAMES = [
    *(
        f"{ZERO}.{name}"
        for name in (
            "stage", "sub_group_size", "overlap_comm", "contiguous_gradients", "allgather_partitions",
            "reduce_scatter", "allgather_bucket_size", "reduce_bucket_size", "offload_optimizer.device",
            "offload_optimizer.pin_memory", "offload_optimizer.nvme_path", "offload_optimizer.buffer_count",
            "offload_optimizer.ratio", "offload_param.device", "offload_param.pin_memory", "offload_param.nvme_path",
            "offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu",
            "stage3_max_live_parameters",
        )
    ),
    *(
        f"activation_checkpointing.{name}"
        for name in (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
        )
    ),
    *(f"aio.{name}" for name in ("block_size", "queue_depth", "single_submit", "overlap_events")),
    "zero_allow_untested_optimizer",
]  # fmt: skip
_FLAGS = [
    "zero_optimization", "offload_optimizer", "offload_parameters", "pin_memory", "contiguous_gradients",
    "overlap_comm", "allgather_partitions", "reduce_scatter", "zero_allow_untested_optimizer", "single_submit",
    "overlap_events", "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
    "synchronize_checkpoint_boundary",
]  # fmt: skip
_NUMBERS = [
    "stage", "params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size",
    "queue_depth", "sub_group_size", "allgather_bucket_size", "reduce_bucket_size",
]  # fmt: skip
_DEVICES = ["offload_optimizer_device", "offload_params_device"]
_SLIPS = ["offload_params", "offload_param", "zero_stage", "device", "pin_memmory"]
_TRUTHS = [
    "True",
    "False",
    "True",
    "False",
    "True",
    "False",
    "1",
    "0",
    "None",
    "'on it'",
    "''",
    "not False",
    "fast",
]
_SIZES = [
    "1",
    "2",
    "3",
    "1e9",
    "500_000_000",
    "2 ** 20",
    "4 * 1024",
    "0x10",
    "-1",
    "int(5e8)",
    "size",
    "None",
]
_TEXTS = ['"cpu"', "'nvme'", '"cpu"', '"nvme"', "'none'", "place", '"nv" + "me"', "None"]
REGISTERED = [
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_1_offload", "deepspeed_stage_2", "deepspeed_stage_2_offload",
    "deepspeed_stage_3", "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme", "fsdp", "fsdp_cpu_offload",
]  # fmt: skip
_NO_NAMES = [
    "deepspeed_offload", "deepspeed_stage_4", "deepspeed_stage_2_offload_nvme", "deepspeed_nvme", "fsdp_offload",
    "deepspeed_stage_3_nvme", "fsdp2",
]  # fmt: skip
_CONFIGS: list[dict[str, Any]] = [
    {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
    {ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5}}},
    {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}, "overlap_comm": False}},
    {ZERO: {"stage": 1}, "aio": {"block_size": 1048576}, "zero_allow_untested_optimizer": True},
    {
        ZERO: {"stage": 3, "stage3_max_live_parameters": 1e9},
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
    {ZERO: {}},
]
_HEAD = "import torch\n{imports}\n\nfast = True\nsize = 5_000_000\nplace = 'nvme'\n"
_OF_TRAINER = "from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy"
_OF_FABRIC = "from lightning.fabric.strategies import DeepSpeedStrategy, FSDPStrategy"
_IMPORTS = {
    "Trainer": [
        f"from lightning.pytorch import Trainer\n{_OF_TRAINER}",
        f"import lightning as L\n{_OF_TRAINER}",
        f"import lightning.pytorch as L\n{_OF_TRAINER}",
    ],
    "Fabric": [
        f"from lightning.fabric import Fabric\n{_OF_FABRIC}",
        f"import lightning as L\n{_OF_FABRIC}",
    ],
}


def _script(maker: str, imports: str, before: str, strategy: str, after: str = "") -> dict[str, Any]:
    made = maker if f"import {maker}" in imports else f"L.{maker}"
    text = f"{_HEAD.format(imports=imports)}{before}trainer = {made}(accelerator='gpu', devices=1, {strategy})\n{after}"
    return {"text": text, "files": {"ds.json": json.dumps(_CONFIGS[0])}}


_PLAIN = _IMPORTS["Trainer"][0]
TABLE = [_script("Trainer", _PLAIN, "", f"strategy={name!r}") for name in (*REGISTERED, *_NO_NAMES)] + [
    _script("Trainer", _PLAIN, before, f"strategy={strategy}")
    for before, strategy in (
        ("", "DeepSpeedStrategy(stage=3, offload_params=True)"),
        ("", "DeepSpeedStrategy(None, True, 3, None, True)"),
        ("", "DeepSpeedStrategy(zero_optimization={'stage': 3})"),
        ("", "DeepSpeedStrategy(zero_optimization={}, offload_optimizer=True)"),
        ("", "DeepSpeedStrategy(zero_optimization='no', offload_optimizer='no')"),
        ("", "DeepSpeedStrategy(config='ds.json', stage=3)"),
        ("", "DeepSpeedStrategy(config='absent.json')"),
        ("", "DeepSpeedStrategy(config={}, stage=3)"),
        ("given = dict(stage=3, offload_optimizer=True)\n", "DeepSpeedStrategy(**given, pin_memory=True)"),
        ("given = {'stage': 3}\ngiven.update(stage=1)\n", "DeepSpeedStrategy(**given)"),
        ("strategy = 'deepspeed'\nif fast:\n    strategy = 'fsdp'\n", "strategy"),
        ("def chosen(stage=2):\n    return DeepSpeedStrategy(stage=stage)\n", "chosen(stage=3)"),
    )
]


def question(random: Random) -> dict[str, Any]:
    """Return a script, and the file that it may name."""
    maker = "Fabric" if random.random() < 0.25 else "Trainer"
    imports = random.choice(_IMPORTS[maker])
    before, strategy = _strategy(random)
    form = random.random()
    if form < 0.2:
        before, strategy = f"{before}chosen = {strategy}\n", "chosen"
    elif form < 0.3 and "absent" not in strategy:  # whoever is not chosen is not asked for his file
        other = random.choice(["'deepspeed_stage_3'", "'fsdp'", "DeepSpeedStrategy(stage=1)"])
        test = random.choice(["fast", "not fast", "size > 1", "place == 'cpu'", "fast and size < 3"])
        before += f"chosen = {strategy}\nif {test}:\n    chosen = {other}\n"
        strategy = "chosen"
    elif form < 0.4:
        body = "".join(f"    {line}\n" for line in [*before.splitlines(), f"return {strategy}"])
        before, strategy = f"def chosen():\n{body}\n", "chosen()"
    elif form < 0.5:
        before += f"options = dict(strategy={strategy})\n"
        return _asked(random, maker, imports, before, "**options")
    elif form < 0.55:
        strategy = f"({strategy}) if fast else 'ddp'"
    return _asked(random, maker, imports, before, f"strategy={strategy}")


def _asked(random: Random, maker: str, imports: str, before: str, strategy: str) -> dict[str, Any]:
    asked = _script(maker, imports, before, strategy)
    asked["files"] = {"ds.json": json.dumps(random.choice(_CONFIGS))}
    return asked


def _strategy(random: Random) -> tuple[str, str]:
    """Return the statements before, and the expression that is the strategy."""
    kind = random.random()
    if kind < 0.12:
        return "", repr(random.choice(REGISTERED if random.random() < 0.8 else _NO_NAMES))
    if kind < 0.16:
        return "", f"FSDPStrategy(cpu_offload={random.choice(_TRUTHS)})"
    if kind < 0.35:
        return _with_config(random)
    given = _arguments(random)
    form = random.random()
    if form < 0.15:
        items = ", ".join(f"{name!r}: {value}" for name, value in given.items())
        return f"given = {{{items}}}\n", "DeepSpeedStrategy(**given)"
    if form < 0.25:
        lines = "".join(f"given[{name!r}] = {value}\n" for name, value in given.items())
        return f"given = dict()\n{lines}", "DeepSpeedStrategy(**given)"
    words = [f"{name}={value}" for name, value in given.items()]
    if form < 0.35:
        places = ["None", random.choice(_TRUTHS), random.choice(_SIZES[:3]), "None", random.choice(_TRUTHS)]
        count = random.randint(1, 5)
        taken = ("accelerator", "zero_optimization", "stage", "remote_device", "offload_optimizer")[:count]
        words = [*places[:count], *(f"{name}={value}" for name, value in given.items() if name not in taken)]
    return "", f"DeepSpeedStrategy({', '.join(words)})"


def _arguments(random: Random) -> dict[str, str]:
    given = {}
    for _ in range(random.randint(0, 7)):
        name, values = random.choice(
            [(_FLAGS, _TRUTHS), (_FLAGS[1:3], _TRUTHS[:2]), (_NUMBERS, _SIZES), (_DEVICES, _TEXTS)]
        )
        chosen = random.choice(name)
        given[chosen] = random.choice(["1", "2", "3"] if chosen == "stage" else values)
    if random.random() < 0.2:
        given["nvme_path"] = random.choice(["'/nvme'", "'/local' + '_nvme'", "'/a/b'"])
    if random.random() < 0.04:
        given[random.choice(_SLIPS)] = "True"
    return given


def _with_config(random: Random) -> tuple[str, str]:
    more = "".join(f", {name}={value}" for name, value in _arguments(random).items() if name not in _SLIPS)
    more = more if random.random() < 0.3 else ""
    config = random.choice(_CONFIGS)
    form = random.random()
    if form < 0.3:
        named = random.choice(["'ds.json'", "'ds.json'", "'./ds.json'", "'absent.json'", "None"])
        return "", f"DeepSpeedStrategy(config={named}{more})"
    if form < 0.6:
        return "", f"DeepSpeedStrategy(config={config!r}{more})"
    change = random.choice(
        [
            "", f"held[{ZERO!r}]['stage'] = 3\n", f"part = held[{ZERO!r}]\npart['stage'] = 2\n",
            f"name = 'sta' + 'ge'\nheld[{ZERO!r}][name] = 1\n",
            f"held[{ZERO!r}] = {{'stage': 1}}\n", "held['aio'] = {}\n",
            f"held.update({config!r})\n", f"held = {{**held, {ZERO!r}: {{'stage': 2}}}}\n",
        ]
    )  # fmt: skip
    return f"held = {config!r}\n{change}", f"DeepSpeedStrategy(config=held{more})"


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return the kind of strategy that our reader believes in, and the values of DeepSpeed's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in asked["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        config = compose([Source("train.py", asked["text"], Path(folder))], [])
    refused = [each for each in config.wrong_types if each.setting.key == "lightning.strategy"]
    if refused or config.missing_files:  # the types in DeepSpeed's JSON are DeepSpeed's to judge
        raise ValueError(str(refused or config.missing_files)[:200])
    ignored = [each for each in config.faults if each.rule == "pl-zero-dict"]
    held = believed_of(config._replace(faults=tuple(set(config.faults) - set(ignored))), NAMES)
    prefix = "deepspeed."
    values = {
        name: config.settings[f"{prefix}{name}"].value
        for name in NAMES
        if f"{prefix}{name}" in config.settings
    }
    unknown = {name: "???" for name in NAMES if f"{prefix}{name}" in config.unresolved | config.maybe_set}
    strategy = config.settings.get("lightning.strategy")
    return {**held, **values, **unknown, "strategy": strategy.value if strategy else "auto"}


def agree(real: Answer, mine: Answer) -> bool:
    """Return whether both refuse, or have the same strategy, and the same values in DeepSpeed's JSON."""
    if "value" in real and "value" in mine:
        ours_names = {name for name, _ in mine["value"]["map"]}
        given = {name for name, _ in real["value"]["map"]}
        spare = {name for name in given - ours_names if _is_written_for_nobody(name, real, mine)}
        real = {"value": {"map": [each for each in real["value"]["map"] if each[0] not in spare]}}
    return same_values(real, mine)


_BESIDE = {
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.contiguous_memory_optimization": False,
    "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "aio.block_size": 1048576,
    "aio.queue_depth": 8,
    "aio.single_submit": False,
    "aio.overlap_events": True,
}


def _is_written_for_nobody(name: str, real: Answer, mine: Answer) -> bool:
    """Return whether the strategy writes DeepSpeed's own default, or NVMe's fields beside another device."""
    values = dict(real["value"]["map"])
    if name in _BESIDE:
        return values[name] == _BESIDE[name]
    section, _, last = name.rpartition(".")
    is_of_nvme = last in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
    return is_of_nvme and values.get(f"{section}.device") == "cpu"
