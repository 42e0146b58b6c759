# SPDX-License-Identifier: Apache-2.0
"""The walk of a saved tensor in docs/design.md, measured in a step: the modules whose functions hold its bytes."""

import re
from pathlib import Path

import torch
from torch import nn
from walks import holders

import reference_impl
from reference_impl import ActivationOffloader
from reference_impl.activations.geometry import Extent
from reference_impl.activations.run import Copied, MovedTensor, SavedStorage
from reference_impl.memory.arena import HostBlock
from reference_impl.memory.tiers import HostBytes

ROOT = Path(reference_impl.__file__).parents[1]
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
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("### Saved tensor → device again\n")[2].partition("\n### ")[0]
    assert sorted(walk) == sorted(re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)), "\n".join(walk)
    assert len(walk) <= 9
