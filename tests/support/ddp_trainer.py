"""Runs as a script under torchrun, two ranks: Transformers' Trainer under DDP, plain and with everything offloaded.

Ends with an error where weights, losses or norms differ.
"""

import sys
from pathlib import Path

import torch
from tiny_llama import OPTIMIZER, Course, built

from reference_impl.integrations.transformers import offload


def main():
    torch.set_num_threads(1)
    courses = []
    for wanted in (None, {"optimizer": OPTIMIZER, "activations": {"mode": "checkpoint", "min_bytes": 1}}):
        folder = Path(sys.argv[1]) / str(wanted is None)
        trainer = built(folder, max_steps=4, gradient_accumulation_steps=2, ddp_backend="gloo")
        assert trainer.args.world_size == 2
        handle = None if wanted is None else offload(trainer, **wanted)
        trainer.train()
        courses.append(Course.of(trainer))
        if handle is not None:
            assert handle.report.activation_bytes > 0
            assert handle.report.optimizer.cpu > 0
            handle.close()
    courses[1].assert_is(courses[0])


main()
