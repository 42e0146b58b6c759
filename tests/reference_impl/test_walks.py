# SPDX-License-Identifier: Apache-2.0
"""The walks of a saved tensor and of a gradient in docs/design.md, measured in a step."""

import torch
from torch import nn
from walks import callers, holders, listed, section

import reference_impl
from reference_impl import ActivationOffloader, HybridDeviceOptimizer, optimizers
from reference_impl.activations.geometry import Extent
from reference_impl.activations.run import Copied, MovedTensor, SavedStorage
from reference_impl.memory.arena import HostBlock
from reference_impl.memory.tiers import HostBytes
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.cpu.update import CpuKernel
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.gradients.clip_decision import ClipDecision
from reference_impl.optimizers.gradients.mover import GradientMover

STANDS_FOR_BYTES = (Copied, Extent, HostBlock, HostBytes, MovedTensor, SavedStorage)
# No weight has as many.
ELEMENTS = 97531
# Calls the function behind it, where another test has imported torch's compiler.
PASSES_ON = "reference_impl/memory/compiler.py"


class Wide(nn.Module):
    """A block with an inner tensor of `ELEMENTS`, which it saves for backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, given):
        return (given * self.scale).expand(ELEMENTS).clone().sin().mean()


def is_the_tensor(each):
    if isinstance(each, torch.Tensor):
        return each.nbytes == 4 * ELEMENTS
    return isinstance(each, STANDS_FOR_BYTES)


def test_a_saved_tensor_passes_nine_modules_at_most_until_it_is_on_the_device_again():
    model = nn.ModuleDict({"layers": nn.ModuleList(Wide() for _ in range(3))})
    model.forward = lambda given: model["layers"][2](model["layers"][1](model["layers"][0](given)))
    with ActivationOffloader(model, num_layers=1, min_bytes=2**16):
        model(torch.ones(())).backward()
        held = holders(
            reference_impl, lambda: model(torch.ones(())).backward(), is_the_tensor, MovedTensor.restore
        )
    walk = [name for name in held if name != PASSES_ON]
    assert sorted(walk) == sorted(listed("Saved tensor → device again")), "\n".join(walk)
    assert len(walk) <= 9


# A gradient's way, in order.
SENT, DECIDED, QUEUED = GradientMover._copy, ClipDecision.__init__, DeadlineWorkers.submit
COUNTED, UPDATED, PUBLISHED, AWAITED = CpuStep.count, CpuKernel.update, Publisher.publish, Publisher.wait
# Hooks and decorators pass calls on, and `step()` asks the engine to take a step.
AROUND = ("gradients/backward_hooks.py", "model_hooks.py", "step.py", "hosted.py", "readers.py")


def test_a_gradient_passes_twelve_modules_at_most_until_the_forward_has_its_new_weight():
    model = nn.Sequential(nn.Linear(3, 3))

    def train():
        optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        optimizer.attach(model)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        model(torch.ones(3))
        optimizer.close()

    found = callers(optimizers, train, [SENT, DECIDED, QUEUED, COUNTED, UPDATED, PUBLISHED, AWAITED])
    walk = [name for name in found if name.removeprefix("reference_impl/optimizers/") not in AROUND]
    assert sorted(walk) == sorted(listed("Gradient → new weight")), "\n".join(found)
    assert len(walk) <= 12
    missing = [name for name in AROUND if f"`{name}`" not in section("Gradient → new weight")]
    assert not missing, f"docs/design.md does not explain the walk: {missing}"
