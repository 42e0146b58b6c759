# SPDX-License-Identifier: Apache-2.0
"""The saved-tensor engine under every activation mechanism.

While a module runs inside `saving()`, autograd hands each tensor that it saves to `pack` and gets a token back. If
the policy offloads a storage, its D2H copy starts at once, behind an event on the current stream, and the storage
stays on the device only until the copy has read it. `unpack` brings it back. Parameters, buffers, their views and
casts of them never move; neither do small tensors, tensor subclasses, and tensors that a recomputation inside
backward saves, since they are used next.

The engine does not know modules or layers; `attach` and the offloaders do.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from reference_impl.activations.geometry import (
    Extent,
    Geometry,
    VersionProbe,
    Weights,
    extent_of,
    flat_bytes,
    is_plain,
)
from reference_impl.activations.headroom import Headroom
from reference_impl.activations.policy import Decision, Policy
from reference_impl.activations.run import BackwardOrders, Copied, ForwardPass, MovedTensor, SavedStorage
from reference_impl.activations.tape import Tape, recipe_for
from reference_impl.activations.tokens import AwaitedTensor, Hooks, KeptTensor, OthersToken
from reference_impl.device import Device
from reference_impl.memory.compiler import uncompiled
from reference_impl.memory.tiers import Tier

_Key = tuple[int, ...]


Token = KeptTensor | MovedTensor | OthersToken


class SavedTensorEngine:
    """Moves the storages that autograd saves on `device` to `tier` and back."""

    def __init__(self, device: Device, tier: Tier, *, headroom: Headroom, min_bytes: int) -> None:
        self.device = device
        self.tier = tier
        self.headroom = headroom
        self.offloaded_bytes = 0
        self.kept_bytes = 0
        self.recomputed_bytes = 0
        self._min_bytes = min_bytes
        # The largest tensor kept for being below `min_bytes`.
        self.largest_small_bytes = 0
        self._orders = BackwardOrders()
        self.weights = Weights()
        self._moved: weakref.WeakValueDictionary[_Key, SavedStorage] = weakref.WeakValueDictionary()
        self._kept: dict[_Key, weakref.ref[torch.UntypedStorage]] = {}
        self._run = self._new_run()
        self._is_running = False
        # With a tape, results can be computed again instead of copied.
        self.tape: Tape | None = None

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[ForwardPass]:
        """Count all tensors saved inside as one run: a forward of `model`."""
        self.device.refuse_capture("activation offload")
        self.weights.refresh(model)
        self._kept.clear()
        if self.tape is not None:
            self.tape.start_run()
        outer, was_running = self._run, self._is_running
        self._run, self._is_running = self._new_run(), True
        self.headroom.start_run(self._run)
        try:
            yield self._run
        finally:
            self._run, self._is_running = outer, was_running

    def saving(
        self,
        module: nn.Module,
        policy: Policy,
        *,
        only: set[int] | None = None,
        bring_weights: Callable[[], None] | None = None,
    ) -> AbstractContextManager[object]:
        """Return a context in which `policy` decides about each saved storage.

        With `only`, a set of storages by their `_cdata`, other storages are left to the outer hooks. `bring_weights` is
        called before backward uses a weight.
        """
        self.device.refuse_capture("activation offload")
        if not self._is_running and (self._run.is_over or not self._run.has_saved):
            # The module is called by itself, outside the model's forward.
            self._run = self._new_run()
            self.headroom.start_run(self._run)
            if self.tape is not None:
                self.tape.start_run()
        # Sharded training may have put this module's parameters into new storages just now.
        self.weights.add(module)
        outer: Hooks | None = (
            torch._C._autograd._top_saved_tensors_default_hooks(True) if only is not None else None
        )

        def pack(tensor: torch.Tensor) -> Token:
            if (
                only is not None
                and tensor.layout is torch.strided
                and tensor.untyped_storage()._cdata not in only
            ):
                return OthersToken(outer, tensor) if outer is not None else KeptTensor(tensor)
            if bring_weights is not None and tensor.layout is torch.strided and self.weights.own(tensor):
                return AwaitedTensor(tensor, bring_weights)
            tape = self.tape
            if tape is None:
                return self._pack(tensor, policy)
            tape.is_paused = True
            try:
                return self._pack(tensor, policy)
            finally:
                tape.is_paused = False

        hooks = torch.autograd.graph.saved_tensors_hooks(uncompiled(pack), _restore)
        return hooks if self.tape is None else _both(hooks, self.tape)

    def going_on(self) -> Callable[[], None]:
        """Return the call by which backward of the running forward tells that it goes on in a recomputed layer."""
        return self._run.go_on

    def save(self, tensor: torch.Tensor, policy: Policy) -> KeptTensor | MovedTensor:
        """Return a token for `tensor`, as `saving` would give autograd."""
        return self._pack(tensor, policy)

    def end_block(self) -> ForwardPass:
        """Note that a block's forward has ended; return its run."""
        if torch.is_grad_enabled() and self._run.has_saved:
            self.headroom.end_forward_segment(self._run)
        return self._run

    def start_loss(self, run: ForwardPass) -> None:
        """Note that `run`'s forward has ended; the loss follows."""
        if torch.is_grad_enabled() and run.has_saved:
            if run.observer is not None:
                run.observer.start_loss()
            with run.observer.saving() if run.observer is not None else nullcontext():
                self.headroom.start_loss(run)

    def _new_run(self) -> ForwardPass:
        return ForwardPass(self.device, self._orders, self.headroom.in_flight, self.headroom)

    def _pack(self, tensor: torch.Tensor, policy: Policy) -> KeptTensor | MovedTensor:
        extent = self._movable_extent(tensor)
        if extent is None or self._is_kept(extent):
            return KeptTensor(tensor)
        saved = self._find(tensor, extent)
        if saved is None:
            with self._run.observer.saving() if self._run.observer is not None else nullcontext():
                saved = self._carry_out(policy.decide(self._run, extent), tensor, extent)
        if saved is None:
            return KeptTensor(tensor)
        return MovedTensor(saved, Geometry.of(tensor), VersionProbe(tensor))

    def _carry_out(self, decision: Decision, tensor: torch.Tensor, extent: Extent) -> SavedStorage | None:
        """Carry out `decision`; return the `SavedStorage` of `extent`, or None when it stays."""
        node = self.tape.node_of(extent.storage) if self.tape is not None else None
        saved = None
        if decision is Decision.KEEP:
            self._keep(extent)
            if node is not None:
                node.kept = weakref.ref(extent.storage)
        else:
            recipe = None
            if decision is Decision.RECOMPUTE and self.tape is not None:
                recipe = self.tape.recipe(extent.storage)
            if recipe is not None and extent.is_whole:
                saved = SavedStorage(self._run, extent, recipe, version=tensor._version, in_flight=None)
                self.recomputed_bytes += extent.size_bytes
            else:
                saved = self._offload(tensor, extent)
            self._moved[extent.key] = saved
            if node is not None:
                node.saved = weakref.ref(saved)
            if node is not None and self._run.observer is not None:
                self._run.observer.saved(
                    saved.index, extent.size_bytes, node.name, recipe_for(node) if extent.is_whole else None
                )
        self.headroom.end_forward_segment(self._run)
        return saved

    def _movable_extent(self, tensor: torch.Tensor) -> Extent | None:
        """Return the bytes behind `tensor`, or None if it has to stay."""
        if not is_plain(tensor, self.device.torch_device):
            return None
        if tensor.nbytes < self._min_bytes:
            if tensor.nbytes > self.largest_small_bytes and not self.weights.own(tensor):
                self.largest_small_bytes = tensor.nbytes
            return None
        # A recomputation inside backward saves tensors that it uses next.
        if torch._C._current_graph_task_id() != -1:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or self.weights.own(tensor):
            return None
        return extent_of(tensor, storage)

    def _is_kept(self, extent: Extent) -> bool:
        kept = self._kept.get(extent.key)
        return kept is not None and kept() is extent.storage

    def _keep(self, extent: Extent) -> None:
        self._kept[extent.key] = weakref.ref(extent.storage)
        self._run.skip()
        self.kept_bytes += extent.size_bytes

    def _find(self, tensor: torch.Tensor, extent: Extent) -> SavedStorage | None:
        """Return the `SavedStorage` of the same bytes in the same version, if there is one."""
        known = self._moved.get(extent.key)
        # An address alone proves nothing: the allocator may have given it to another storage meanwhile.
        if known is None or known.origin() is not extent.storage or known.version != tensor._version:
            return None
        return known

    def _offload(self, tensor: torch.Tensor, extent: Extent) -> SavedStorage:
        if extent.is_compact:
            original = flat_bytes(tensor.contiguous().untyped_storage(), 0, extent.size_bytes)
        else:
            original = flat_bytes(extent.storage, extent.start, extent.size_bytes)
        stored = self.tier.store(original, after=self.device.record())
        try:
            self.headroom.hold(self._run, stored.stored, original)
            copied = Copied(self.device, stored, extent.size_bytes)
            saved = SavedStorage(self._run, extent, copied, version=tensor._version, in_flight=original)
        except BaseException:
            stored.release()
            raise
        self.offloaded_bytes += extent.size_bytes
        return saved


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def _restore(token: Token) -> torch.Tensor:
    return token.restore()


# Compiled autograd would trace into the copies. `torch.compiler.disable` sets the same, but imports the compiler for
# everybody who never uses it.
_restore._torchdynamo_disable = True  # type: ignore[attr-defined]
