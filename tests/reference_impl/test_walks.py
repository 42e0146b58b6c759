"""The walk of a saved tensor in docs/design.md, measured in a step: the modules whose functions hold its bytes."""

import re
import sys
from pathlib import Path

import torch
from torch import nn

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


def holders(action, until):
    """Return the modules of `reference_impl` in which a local variable or a result holds a saved tensor, in order.

    The walk ends when the function `until` first returns.
    """
    found, ended = {}, False

    def note(frame, event, result):
        nonlocal ended
        file = frame.f_code.co_filename
        if ended or event != "return" or not file.startswith(str(ROOT / "reference_impl")):
            return
        if any(map(is_the_tensor, (*frame.f_locals.values(), result))):
            found.setdefault(str(Path(file).relative_to(ROOT)))
        ended = frame.f_code is until.__code__

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    assert ended
    return [name for name in found if name != PASSES_ON]


def test_a_saved_tensor_passes_nine_modules_at_most_until_it_is_on_the_device_again():
    model = nn.ModuleDict({"layers": nn.ModuleList(Wide() for _ in range(3))})
    model.forward = lambda given: model["layers"][2](model["layers"][1](model["layers"][0](given)))
    with ActivationOffloader(model, num_layers=1, min_bytes=2**16):
        model(torch.ones(())).backward()
        walk = holders(lambda: model(torch.ones(())).backward(), MovedTensor.restore)
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("### Saved tensor → device again\n")[2].partition("\n### ")[0]
    assert sorted(walk) == sorted(re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)), "\n".join(walk)
    assert len(walk) <= 9
