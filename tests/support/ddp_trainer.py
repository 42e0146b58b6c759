# SPDX-License-Identifier: Apache-2.0
"""Runs as a script under torchrun, two ranks: Transformers' Trainer under DDP, plain and with everything offloaded.

Ends with an error where weights, losses, norms or the ranks' splits differ, or gradients leave otherwise than asked.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_llama import CPU, OPTIMIZER, Course, built
from transformers import TrainerCallback

from reference_impl import Budgets, Streaming
from reference_impl.integrations.transformers import offload
from reference_impl.optimizers.gradients.stand_in import GradientStandIn

SETTINGS = {"max_steps": 4, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
CHECKPOINT = {"mode": "checkpoint", "min_bytes": 1}


class Leaving(TrainerCallback):
    """Notes before each step whether gradients have left their parameters."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        grads = [param.grad for param in kwargs["model"].parameters()]
        self.found.append(any(isinstance(grad, GradientStandIn) for grad in grads))


def run(folder, optimizer=None):
    trainer = built(folder, **SETTINGS)
    assert trainer.args.world_size == 2
    if optimizer is None:
        trainer.train()
        return Course.of(trainer), None, []
    leaving = Leaving()
    trainer.add_callback(leaving)
    with offload(trainer, optimizer=optimizer, activations=CHECKPOINT) as handle:
        trainer.train()
        assert handle.report.activation_bytes > 0
        return Course.of(trainer), handle.report.optimizer, leaving.found


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    expected, _, _ = run(folder / "plain")
    for overlap, leaves in (("nothing", False), ("gradients", True)):
        course, split, left = run(folder / overlap, OPTIMIZER | {"backward_overlap": overlap})
        course.assert_is(expected)
        assert split.cpu > 0
        assert left == [leaves] * 4, left
    # Each rank alone would choose otherwise.
    budgets = Budgets(device_bytes=(dist.get_rank() + 1) * 120_000)
    auto = {"split": "auto", "budgets": budgets, "streaming": Streaming(chunk_bytes=768), "cpu": CPU}
    course, split, _ = run(folder / "auto", auto)
    course.assert_is(expected)
    splits = [None, None]
    dist.all_gather_object(splits, tuple(split))
    assert splits[0] == splits[1]
    assert split.resident < 1


main()
# Gloo's thread may drop the last tensors while the interpreter ends, which aborts the process. The group ends before,
# and joins it, once nothing refers to the group.
gc.collect()
dist.destroy_process_group()
