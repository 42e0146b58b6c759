# SPDX-License-Identifier: Apache-2.0
"""The levers of torchtune beside offloading: its batch, its linear cross entropy, bitsandbytes' 8-bit states, shards.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, levers
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.torchtune.run import is_sharded

_OWN = "torchtune."
_LOSS = "torchtune.modules.loss.LinearCrossEntropyLoss"


def found(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield torchtune's levers; another recipe is another program, so none is proposed."""
    yield from levers.micro_batches(run, f"{_OWN}batch_size", f"{_OWN}gradient_accumulation_steps")
    if "LinearCrossEntropy" not in (fields.text(config, f"{_OWN}loss._component_") or ""):
        yield Lever(Kind.FUSED_LOSS, "torchtune's linear cross entropy", {f"{_OWN}loss._component_": _LOSS})
    optimizer = fields.text(config, f"{_OWN}optimizer._component_") or ""
    if run.adapter is None and not is_sharded(config) and optimizer.startswith("torch.optim.AdamW"):
        eight = {f"{_OWN}optimizer._component_": "bitsandbytes.optim.AdamW8bit"}
        yield Lever(Kind.STATES, "8-bit Adam states", eight)
    yield from levers.sequences(run, f"{_OWN}tokenizer.max_seq_len")
    if is_sharded(config):
        yield from levers.more_gpus(run)
