# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop as a dialect: settings on the command line, a model by name or by sizes, no files, no rules."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source
from skill_tools.dialects.base import Dialect
from skill_tools.dialects.pytorch import PYTORCH
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

if TYPE_CHECKING:
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.patch import Patch
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

SETTINGS = (
    "seq_length",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "recompute_granularity",
    "lora_rank",
    "max_grad_norm",
    "fused_loss",
    "streamed_states",
    "optimizer",
    "sharding",
    "shard_dtype",
)
_CALLS_OF_A_LOOP = (".backward(", ".step(")
_PLACE = Place("<overrides>", 1, 1)


class PyTorch(Dialect):
    """A loop that someone wrote; `reference_impl` moves its tensors."""

    name = PYTORCH
    label = "a plain PyTorch loop"
    has_files = False
    carry_out = (
        "to carry it out, save it (--format json > plan.json), then train inside "
        '`with cpu_offloading.apply_plan(model, optimizer, "plan.json") as applied:` and step applied.optimizer'
    )

    def answer_to_loop(self, text: str) -> str:
        """Return the place of a loop's answer; a loop makes gradients and steps an optimizer by itself."""
        if not all(call in text for call in _CALLS_OF_A_LOOP):
            return ""
        return (
            f"{COMMAND} plan --framework {self.name} --model NAME --gpu NAME, which plans it; "
            "docs/pytorch-loop.md has the lines to add"
        )

    def launched_by(self, run: "TrainingRun") -> str:
        """Return the lines that launch the loop on several GPUs and share its model between them."""
        if run.spread is None:
            return ""
        from skill_tools.dialects.pytorch.spread import launch

        return launch(run)

    def carried_out_by(self, mode: "Mode", run: "TrainingRun") -> str:
        """Return the call, and the objects that it makes; a loop's own checkpointing has to go first."""
        from skill_tools.dialects.pytorch.candidates import objects
        from skill_tools.dialects.run import Mode

        checkpoints = run.recompute.granularity != "none"
        recomputes = mode.recompute is not None and mode.recompute.granularity != "none"
        if mode == Mode(recompute=mode.recompute) and recomputes == checkpoints:
            return ""
        lines = ["take checkpointing out of the loop"] * checkpoints
        if mode != Mode(recompute=mode.recompute) or recomputes:
            lines.append(self.carry_out)
            if mode.weight_layers or (mode.trained_layers and not run.is_fully_sharded):
                lines.append(
                    'a model that is larger than the GPU stays on the CPU: apply_plan(..., device="cuda")'
                )
            lines += [f"or make its objects yourself: {made}" for made in objects(mode, run)]
        return "\n".join(lines)

    @property
    def heading(self) -> str:
        """The heading names the package that moves the tensors."""
        return "PyTorch (`reference_impl`)"

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read `key=value` settings; raises `UnusableInput` for a name unknown to a loop."""
        settings = {}
        for key, value in _pairs([word for text in overrides for word in text.split()]).items():
            if key not in SETTINGS and not _is_size(key):
                raise UnusableInput(
                    f"--overrides {key}={value} means nothing to {self.label}",
                    expected=f"one of {', '.join(SETTINGS)} or a size of the model",
                    attempt="--framework megatron-bridge for keys of Megatron Bridge",
                )
            settings[key] = Setting(key, value, key, _PLACE)
        return Config(self.name, MappingProxyType(settings), complete=True)

    def size_override(self, *keys: str) -> str:
        """Return the overrides as `compose` takes them."""
        return f"--overrides {' '.join(f'{key}=N' for key in keys)}"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run: bf16 weights and fp32 master weights on one GPU, FSDP2's shards on several."""
        from skill_tools.dialects.pytorch.run import build

        return build(config, shape, gpus=gpus)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every combination of the reference implementation's mechanisms."""
        from skill_tools.dialects.pytorch.candidates import candidates

        return candidates(run, advice)

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in a loop."""
        from skill_tools.dialects.pytorch.levers import found

        return found(run)

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return an empty patch: a plan's changes are carried out here, not written."""
        from skill_tools.dialects.patch import Patch

        return Patch(self.name, settings, "", "")

    def execute(self, mode: "Mode", run: "TrainingRun", peak_bytes: int) -> dict[str, object]:
        """Return the instructions of `reference_impl.apply_plan`."""
        from skill_tools.dialects.pytorch.candidates import execute

        return execute(mode, run, peak_bytes)


def _is_size(name: str) -> bool:
    key = load_keys().get(name)
    return key is not None and key.mechanism == "model"


def _pairs(written: Sequence[str]) -> Mapping[str, str]:
    pairs = {}
    for item in written:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UnusableInput(
                f"--overrides {item!r}", expected="KEY=VALUE", attempt="--overrides seq_length=8192"
            )
        pairs[key.strip()] = value.strip()
    return pairs


DIALECT = PyTorch()
