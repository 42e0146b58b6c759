# SPDX-License-Identifier: Apache-2.0
"""Finds the streamable parts of a model: its repeated blocks, and the storages used by one block only.

Storages count, not parameters: tied and shared tensors are one storage, and a packed quantised weight is as many
plain tensors as it holds. Small frozen tensors stay in place, and storages used outside the block too. So do trained
tensors unless they are asked for.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from reference_impl.memory.absent import storage_of
from reference_impl.memory.ledger import note_on_device

# Norm weights and biases: too small to be worth a check on every visit.
MIN_BYTES = 2**14
# The caching allocator's own alignment: matrix kernels choose their path by it, and results follow the path.
ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class BlockStorage:
    """One storage of a block and every tensor that views it, with their names in the model."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole storage."""
        return storage_of(self.tensors[0]).nbytes()

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.tensors[0].device


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of `model` by name: the members of its outermost lists of two or more.

    A list is an `nn.ModuleList`, or an `nn.Sequential` of one class. Raises ValueError when there is none.
    """
    blocks: dict[str, nn.Module] = {}
    found: list[str] = []
    for name, module in model.named_modules():
        if not _is_list_of_blocks(module) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        found.append(name)
        for index, block in enumerate(module.children()):
            blocks[f"{name}.{index}" if name else str(index)] = block
    if not blocks:
        single = next((n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)), None)
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks: looked for an nn.ModuleList of two or more modules, "
            "or an nn.Sequential of two or more of one class; try "
            + ("layers=[modules]" if single is None else f"layers=model.{single}, which is a list of one")
        )
    return blocks


def streamable_storages(
    model: nn.Module, blocks: Sequence[nn.Module], *, with_trained: bool = False
) -> list[list[BlockStorage]]:
    """Return, for each of `blocks`, the storages that may stream: in the order of its modules, small ones last.

    `with_trained` adds the storages of trained tensors, small ones included: all that a block trains stays together.
    Raises ValueError for a sharded (DTensor) parameter, which it names.
    """
    owner_of_module = _owners(blocks)
    # By identity: a module may hold another one's, and each is placed anew once.
    tensors: defaultdict[int, dict[int, tuple[str, torch.Tensor]]] = defaultdict(dict)
    owners: defaultdict[int, set[int]] = defaultdict(set)
    trained: set[int] = set()
    small: set[int] = set()
    for module, name, tensor, is_trained in plain_tensors(model):
        storage = storage_of(tensor)
        tensors[storage._cdata].setdefault(id(tensor), (name, tensor))
        owners[storage._cdata].add(owner_of_module.get(id(module), -1))
        if is_trained:
            trained.add(storage._cdata)
        if storage.nbytes() < MIN_BYTES:
            small.add(storage._cdata)
    unfit = small - trained if with_trained else small | trained
    streamable: list[list[BlockStorage]] = [[] for _ in blocks]
    for key, named in tensors.items():
        (owner, *others) = owners[key]
        if owner >= 0 and not others and key not in unfit:
            names, views = zip(*named.values(), strict=True)
            streamable[owner].append(BlockStorage(names, views))
    # Matrices side by side: one copy, or one kernel, may then serve several.
    return [sorted(block, key=lambda storage: storage.size_bytes < MIN_BYTES) for block in streamable]


def slices_of_one_buffer(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, str, int] | None:
    """Return the names of two tensors, one of a block, in one storage that no block has to itself, and its bytes."""
    owner_of_module = _owners(blocks)
    first: dict[int, tuple[int, str, torch.Tensor]] = {}
    for module, name, tensor, _ in plain_tensors(model):
        owner, storage = owner_of_module.get(id(module), -1), storage_of(tensor)
        other, other_name, beside = first.setdefault(storage._cdata, (owner, name, tensor))
        if other != owner and beside.data_ptr() != tensor.data_ptr():
            names = (name, other_name) if other < 0 else (other_name, name)
            return *names, storage.nbytes()
    return None


def refuse_slices(found: tuple[str, str, int] | None) -> None:
    """Raise ValueError for a finding of `slices_of_one_buffer`."""
    if found is not None:
        name, other, size_bytes = found
        raise ValueError(
            f"{name} and {other} are slices of one buffer of {size_bytes} bytes; expected memory of one "
            "block alone; try `for p in model.parameters(): p.data = p.data.clone()` before "
            "the streamer is made"
        )


def weighted_modules(block: nn.Module, *, with_trained: bool = False) -> list[nn.Module]:
    """Return the modules of `block` that hold a tensor large enough to stream: a frozen one, or any."""
    return [
        module
        for module in block.modules()
        if any(
            plain.nbytes >= MIN_BYTES
            for tensor in chain(module._parameters.values(), module._buffers.values())
            if tensor is not None and (with_trained or not tensor.requires_grad)
            for _, plain in unpacked("", tensor)
        )
    ]


def layout(storages: Sequence[BlockStorage]) -> tuple[list[int], int]:
    """Return an aligned offset for each of a block's storages, and the bytes of all."""
    offsets, end = [], 0
    for storage in storages:
        offsets.append(end)
        end += math.ceil(storage.size_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def longest_bytes(blocks: Iterable[Iterable[BlockStorage]]) -> int:
    """Return the bytes of the longest storage of all `blocks`."""
    return max(storage.size_bytes for block in blocks for storage in block)


def _is_list_of_blocks(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 1
    return (
        isinstance(module, nn.Sequential)
        and len(module) > 1
        and len({type(child) for child in module}) == 1
        and any(True for _ in module.parameters())
    )


def _owners(blocks: Iterable[nn.Module]) -> dict[int, int]:
    """Return the block's index by the id of each module in it, or -1 for a module that several blocks hold."""
    owner: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for module in block.modules():
            owner[id(module)] = index if id(module) not in owner else -1
    return owner


def plain_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor, bool]]:
    """Yield every strided tensor of `model`, also inside packed ones: its module, name, and whether it trains.

    Raises ValueError for a sharded parameter, and for a packed one that does not name its tensors.
    """
    for prefix, module in model.named_modules():
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if hasattr(tensor, "_local_tensor") or getattr(tensor, "_is_flat_param", False):
                raise ValueError(
                    f"{full_name} is sharded ({type(tensor).__name__}); expected whole parameters: streaming does "
                    "not go with FSDP; try one of the two"
                )
            if _hides_what_it_holds(tensor):
                raise ValueError(
                    f"{full_name} is a {type(tensor).__name__}, without memory of its own, and hides its inner "
                    "tensors; expected plain weights, or quantized ones of torchao or bitsandbytes; try one "
                    "of these, or leave streaming of weights out"
                )
            for inner_name, plain in unpacked(full_name, tensor):
                if plain.layout is torch.strided and not plain.is_quantized:
                    yield module, inner_name, plain, tensor.requires_grad


def _hides_what_it_holds(tensor: torch.Tensor) -> bool:
    """Whether `tensor` wraps others without the protocol that names them: reading its storage ends the process."""
    if is_traceable_wrapper_subclass(tensor) or type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    storage = storage_of(tensor)
    if storage.nbytes() == 0 or storage.device.type == "meta":
        return False
    try:
        return storage.data_ptr() == 0
    except RuntimeError:
        # torch's own word for it: an invalid storage
        return True


def unpacked(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors that `tensor` is made of: itself, or the parts of a packed subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    parts, _ = tensor.__tensor_flatten__()
    for part in parts:
        yield from unpacked(f"{name}.{part}", getattr(tensor, part))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of `tensor` as flat uint8."""
    storage = storage_of(tensor)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def placed(flat: torch.Tensor, tensor: torch.Tensor, shift_bytes: int) -> torch.Tensor:
    """Return `tensor`'s geometry over the storage of `flat`, `shift_bytes` further on."""
    offset = tensor.storage_offset() + shift_bytes // tensor.itemsize
    return torch.empty(0, dtype=tensor.dtype, device=flat.device).set_(
        flat.untyped_storage(), offset, tensor.size(), tensor.stride()
    )


def move(model: nn.Module, device: torch.device) -> None:
    """Move the storages of the model's tensors to `device`, as far as they are elsewhere.

    The tensors stay the same objects; tensors that share a storage still do, and gradients go along.
    """
    by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for _, _, tensor, _ in plain_tensors(model):
        if tensor.device == device:
            note_on_device(tensor)
        else:
            by_storage[storage_of(tensor)._cdata].append(tensor)
    for views in by_storage.values():
        moved = bytes_of(views[0]).to(device)
        for tensor in views:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = placed(moved, tensor, 0)
            tensor.grad = None if gradient is None else gradient.to(device)
