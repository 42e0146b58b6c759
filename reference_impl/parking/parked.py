# SPDX-License-Identifier: Apache-2.0
"""`park`: training memory leaves the device as a whole, and comes back unchanged.

After an error, Ctrl-C or a lack of memory either everything is parked or nothing has moved (`transfer`), and `status`
says which.

Explained in docs/parking.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from reference_impl.distributed.ddp import data_parallels
from reference_impl.distributed.ranks import RankGroup, alike
from reference_impl.memory.closing import ClosedAtExit, close_behind, closed_behind, undo_all
from reference_impl.memory.shown import Report, Shown
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.parking.given import check_ranges, check_timeout, given
from reference_impl.parking.graphs import captured_before
from reference_impl.parking.guards import guard, guard_gradients
from reference_impl.parking.host_states import HostStates
from reference_impl.parking.masters import MastersOfParked
from reference_impl.parking.storage import ParkedStorage
from reference_impl.parking.tensors import KINDS, Found, FoundStorage, Kind, find
from reference_impl.parking.transfer import Transfer

Status = Literal["present", "parked", "closed"]

# Kept alive while their tensors have no memory: nothing else could bring the memory back.
_parked: set[ParkedTraining] = set()
_CAPTURED = "a CUDA graph has been captured of it, and knows its address as long as there are graphs"


def park(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    also: Sequence[object] = (),
    gradients: Literal["keep", "drop"] = "keep",
    host_limit_bytes: int | None = None,
    strict: bool = True,
    keep_host: bool = True,
    timeout_s: float = 60.0,
) -> ParkedTraining:
    """Return the training memory of a model and its optimizer as one object to park; nothing moves yet.

    >>> parked = park(model, optimizer)
    >>> with parked:
    ...     generate()  # the GPU is free
    >>> train_on()

    Args:
        model: a module, or several. Under FSDP2 the sharded module, under DistributedDataParallel the wrapped one.
        optimizer: the optimizers that train it: any `torch.optim.Optimizer`, ours among them.
        also: more to park: tensors, containers, modules, streamers and offloaders of this package.
        gradients: `keep` parks them, `drop` sets them to None at each `park()`.
        host_limit_bytes: the most host memory to take; memory beyond the limit of pinning (`limit_pinned_memory`) is
            pageable.
        strict: raise at `park()` for a storage that cannot leave; False leaves it, and the report names it.
        keep_host: False gives the host memory back at each `restore()`, and takes it anew at the next `park()`.
        timeout_s: how long `restore()` waits for memory on the device.

    Raises ValueError for training memory on several accelerators, an optimizer of other parameters than the model's, or
    an option out of range; RuntimeError for a closed optimizer.
    """
    models, optimizers = given(model, optimizer, also=also)
    if gradients not in ("keep", "drop"):
        raise ValueError(f"gradients is {gradients!r}; expected 'keep' or 'drop'; try 'keep'")
    check_ranges(host_limit_bytes=host_limit_bytes, timeout_s=timeout_s)
    for each in optimizers:
        _finish(each)
    return ParkedTraining(
        models,
        optimizers,
        also=also,
        drops_gradients=gradients == "drop",
        host_limit_bytes=host_limit_bytes,
        strict=strict,
        keep_host=keep_host,
        timeout_s=timeout_s,
    )


@dataclass(frozen=True, kw_only=True)
class ParkingReport(Report):
    """The bytes moved by the last `park()` and `restore()`.

    Args:
        parked_bytes: bytes of the parked storages, by kind.
        copied_bytes: bytes copied out; the others were on the host already.
        left: tensors that cannot leave the device, by name, and why.
        host_bytes: pinned host memory of the parking.
        park_s, restore_s: seconds of the calls, from the synchronized device to the synchronized device.
    """

    parked_bytes: Mapping[Kind, int] = field(default_factory=dict)
    copied_bytes: int = 0
    left: Mapping[str, str] = field(default_factory=dict)
    host_bytes: int = 0
    park_s: float = 0.0
    restore_s: float = 0.0

    def __str__(self) -> str:
        """Return it in a few words."""
        kinds = ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in self.parked_bytes.items())
        left = f"; {len(self.left)} tensors stay" if self.left else ""
        return f"{kinds}; away in {self.park_s:.2f} s, back in {self.restore_s:.2f} s{left}"


class ParkedTraining(Shown, ClosedAtExit):
    """The training memory of models and optimizers; `park` makes and documents it.

    A `with` block parks it and brings it back at its end. `close()` brings it back for good, and gives the host memory
    and the hooks back.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        also: Sequence[object],
        drops_gradients: bool,
        host_limit_bytes: int | None,
        strict: bool,
        keep_host: bool,
        timeout_s: float,
    ) -> None:
        self._models, self._optimizers, self._also = models, optimizers, also
        self._drops_gradients, self._strict = drops_gradients, strict
        self._keep_host, self._timeout_s = keep_host, timeout_s
        self._device = self._find().device
        self._transfer = Transfer(self._device, host_limit_bytes=host_limit_bytes)
        self._ranks = _ranks_of(models)
        self._is_read = self._is_closed = False
        self._masters = MastersOfParked(optimizers)
        # The kinds in CUDA graphs captured before and perhaps still alive.
        self._captured = captured_before(models, optimizers, self._device)
        self._unguard: list[Callable[[], None]] = []
        self._report = ParkingReport()
        # Calls that `close` has still to make.
        self._undo: list[Callable[[], None]] = [self._transfer.drop_host]
        try:
            guard(
                models,
                optimizers,
                weights=self._refuse_without_weights,
                gradients=self._refuse_without_gradients,
                training=self._refuse_without_all,
                undo=self._undo,
            )
        except BaseException as error:
            close_behind(error, self.close)
            raise

    def _facts(self) -> Mapping[str, str]:
        return {"status": self.status, **self.report._facts()}

    @property
    def status(self) -> Status:
        """`present`: everything is on the device; `parked`: the `parked_kinds` are not; `closed`."""
        if self._is_closed:
            return "closed"
        return "parked" if self.parked_kinds else "present"

    @property
    def parked_kinds(self) -> tuple[Kind, ...]:
        """The kinds with parked memory."""
        kinds = {each.kind for each in self._transfer.parked}
        return tuple(kind for kind in KINDS if kind in kinds)

    @property
    def report(self) -> ParkingReport:
        """The bytes moved by the last `park()` and `restore()`."""
        return self._report

    def prepare(self) -> None:
        """Start to pin the host memory of the first `park()` in the background, for instance before a backward.

        It pins the present size of training memory; later gradients and states come on top.
        """
        self._check_open()
        self._transfer.prepare(found.size_bytes for found in self._find().storages)

    def park(self, *, weights: bool = True) -> ParkingReport:
        """Move training memory to the host and give it back to the driver, the allocator's cache included.

        Call it between a step and the next forward, or between two micro-batches of an accumulation, never between a
        forward and its backward. On several ranks it is a collective.

        Args:
            weights: False leaves parameters and buffers on the device, for a weight sync.

        Raises RuntimeError if all of it is parked already, here or by another `park`, if this or an optimizer is
        closed, and for a storage that cannot leave (`strict`); HostMemoryError for too little host memory. Then nothing
        has moved.
        """
        self._check_open()
        self._check_alone()
        self._device.refuse_capture("parking")
        start_s = time.perf_counter()
        with self._transfer.abandoned_on_error(), self._gradients_guarded():
            with alike(self._ranks):
                for optimizer in self._optimizers:
                    _finish(optimizer)
                for model in self._models:
                    _free_gathered(model)
                self._device.synchronize()
                kinds = self._kinds(weights=weights)
                # It may ask the device: before copies the answer is quick.
                self._masters.weights_leave()
                self._transfer.start_early(kinds)
                found, left = self._movable(kinds)
                if not found and self._transfer.parked:
                    raise RuntimeError(
                        "training is parked already; expected it on the device; try restore() first"
                    )
                storages = self._transfer.take(found)
                copied_bytes = self._transfer.start_out(storages)
                of_graphs = self._transfer.leave_to_graphs(storages)
                self._check_left(of_graphs)
                if self._drops_gradients:
                    self._zero_gradients()
                if not self._unguard:
                    guard_gradients(self._models, self._refuse_without_gradients, undo=self._unguard)
                self._transfer.finish_out(storages)
            _parked.add(self)
            try:
                self._transfer.free_device(storages)
            finally:
                self._let_go()
        self._transfer.give_back()
        self._report = replace(
            self._report,
            parked_bytes=_bytes_by_kind(self._transfer.parked),
            copied_bytes=copied_bytes,
            left={**left, **of_graphs},
            host_bytes=self._transfer.host_bytes,
            park_s=time.perf_counter() - start_s,
        )
        return self._report

    def restore(self, *kinds: Kind, timeout_s: float | None = None) -> ParkingReport:
        """Bring training memory back, and return when it is there. On several ranks it is a collective.

        Args:
            kinds: `weights`, `gradients`, `states`, `extra`; all without any. With weights alone the model can run, but
                not train.
            timeout_s: seconds to wait for memory still held by others, in place of the constructor's.

        Raises RuntimeError if none of these is parked, ValueError for an unknown kind, and torch.OutOfMemoryError if
        the memory does not come in time. Then everything is still parked.
        """
        self._check_open()
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(
                f"restore() got {', '.join(map(repr, unknown))}; expected some of {', '.join(KINDS)}; try restore()"
            )
        if timeout_s is not None:
            check_timeout(timeout_s)
        storages = [each for each in self._transfer.parked if not kinds or each.kind in kinds]
        if not storages:
            raise RuntimeError(
                f"nothing of {', '.join(kinds or KINDS)} is parked; expected tensors that park() has moved; try "
                "park() before"
            )
        start_s = time.perf_counter()
        try:
            with alike(self._ranks):
                self._transfer.bring_back(
                    storages, timeout_s=self._timeout_s if timeout_s is None else timeout_s
                )
            self._transfer.be_present(storages, then=self._masters.weights_are_back)
        except BaseException:
            self._transfer.free_again(storages)
            raise
        with self._gradients_guarded():
            self._let_go()
        if not self._keep_host and not self._transfer.parked:
            self._transfer.drop_host()
        self._report = replace(self._report, restore_s=time.perf_counter() - start_s)
        return self._report

    def state_dict(self, *, while_parked: bool = False) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ...}`, each a list if several were given.

        Tensors are copies in ordinary memory, and shards are DTensors with such a copy.

        Args:
            while_parked: read parked tensors from the host; nothing moves.

        Raises RuntimeError while something is parked, without `while_parked`.
        """
        with self._states_read("state_dict()", while_parked=while_parked) as states:
            return states.copied()

    def load_state_dict(self, states: Mapping[str, Any], *, while_parked: bool = False) -> None:
        """Load a `state_dict()` of this training, in place.

        Args:
            states: the same models and optimizers, in the same order.
            while_parked: write parked tensors to the host, and `restore()` brings them.

        Raises ValueError for another structure, shape or dtype, and RuntimeError while something is parked, without
        `while_parked`: before anything is written.
        """
        with self._states_read("load_state_dict()", while_parked=while_parked) as mine:
            mine.write(states)

    def close(self) -> None:
        """Bring everything back for good; give host memory and hooks back. Calling it again does nothing."""
        if self._is_closed:
            return
        if self._transfer.parked:
            self.restore()
        undo_all(self._unguard)
        undo_all(self._undo)
        self._is_closed = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all parked tensors behind the block; an exception from the block stays the raised one.

        For blocks behind a `park(weights=False)`; `with parked:` parks everything.
        """
        with closed_behind(self._restore_all):
            yield

    def __enter__(self) -> Self:
        """Park."""
        self.park()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore all parked tensors; an exception from the block stays the raised one."""
        close_behind(error, self._restore_all)

    @contextmanager
    def _gradients_guarded(self) -> Iterator[None]:
        """Behind the block leave no guards of gradients, unless weights or gradients are away."""
        try:
            yield
        finally:
            if not {"weights", "gradients"} & {*self.parked_kinds}:
                undo_all(self._unguard)

    def _let_go(self) -> None:
        if not self._transfer.parked:
            _parked.discard(self)

    def _restore_all(self) -> None:
        if self._transfer.parked:
            self.restore()

    def _find(self) -> Found:
        return find(self._models, self._optimizers, self._also)

    def _kinds(self, *, weights: bool) -> list[Kind]:
        """Return the kinds that a parking moves."""
        stay = {"weights": not weights, "gradients": self._drops_gradients}
        return [kind for kind in KINDS if not stay.get(kind)]

    def _movable(self, kinds: Sequence[Kind]) -> tuple[list[FoundStorage], Mapping[str, str]]:
        """Return the movable storages of `kinds`, and by name why others cannot move; if `strict`, these raise."""
        found = self._find()
        left = dict(found.unmovable)
        if self._captured and not self._transfer.has_graphs:
            self._captured.clear()
        wanted = [each for each in found.storages if each.kind in kinds]
        left |= {each.name: _CAPTURED for each in wanted if each.kind in self._captured}
        wanted = [each for each in wanted if each.kind not in self._captured]
        self._check_left(left)
        for model in self._models:
            for parallel in data_parallels(model):
                if not parallel.gradient_as_bucket_view:
                    left["DistributedDataParallel's buckets"] = "expected gradient_as_bucket_view=True"
        return wanted, left

    def _check_left(self, left: Mapping[str, str]) -> None:
        if left and self._strict:
            listed = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:5])
            raise RuntimeError(
                f"{len(left)} tensors cannot leave the device ({listed}); expected storages of torch's own allocator; "
                "try strict=False to leave them there"
            )

    def _zero_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for model in self._models:
            model.zero_grad()

    @contextmanager
    def _states_read(self, action: str, *, while_parked: bool) -> Iterator[HostStates]:
        """Let states be read and written inside, if `while_parked` also parked ones."""
        self._check_open()
        if self._transfer.parked and not while_parked:
            raise RuntimeError(
                f"{action} came while training memory is parked; expected it on the device; try while_parked=True, "
                "which takes the copy on the host, or restore() first"
            )
        self._is_read = True
        try:
            yield HostStates(
                self._models, self._optimizers, self._transfer.parked, follow=self._masters.behind()
            )
        finally:
            self._is_read = False
        self._masters.have_followed()

    def _note_capture(self, *kinds: Kind) -> None:
        """Note that a running capture learns the addresses of `kinds`."""
        if not torch.compiler.is_compiling() and self._device.is_capturing:
            self._captured.update(kinds)

    def _refuse_without_weights(self, action: str) -> None:
        self._note_capture("weights")
        if not self._is_read and any(each.kind == "weights" for each in self._transfer.parked):
            raise _parked_error(action)

    def _refuse_without_gradients(self, action: str) -> None:
        self._note_capture("weights", "gradients")
        if any(each.kind in ("weights", "gradients") for each in self._transfer.parked):
            raise _parked_error(action)

    def _refuse_without_all(self, action: str) -> None:
        self._note_capture("weights", "gradients", "states")
        if not self._is_read and self._transfer.parked:
            raise _parked_error(action)

    def _check_alone(self) -> None:
        """Raise RuntimeError if another parking has parked a parameter of these models."""
        others = _parked - {self}
        mine = {id(param) for model in self._models for param in model.parameters()} if others else set()
        if any(
            id(param) in mine for each in others for model in each._models for param in model.parameters()
        ):
            raise RuntimeError(
                "another park() of this model has parked it; expected it on the device; try restore() of that one"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "this parking is closed; expected an open one; try park(model, optimizer) again"
            )


def _parked_error(action: str) -> RuntimeError:
    return RuntimeError(
        f"{action} came while training memory is parked; expected it on the device; try restore() first"
    )


def _finish(optimizer: torch.optim.Optimizer) -> None:
    """Finish the running update of one of our optimizers. Raises RuntimeError when it is closed or broken."""
    if isinstance(optimizer, HostedOptimizer):
        optimizer.synchronize()


def _free_gathered(model: nn.Module) -> None:
    """Free parameters that FSDP2 has gathered and still keeps after their backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _ranks_of(models: Sequence[nn.Module]) -> RankGroup | None:
    """Return the ranks that train `models` together; None for one."""
    for model in models:
        for parallel in data_parallels(model):
            return RankGroup.of(parallel.parameters(), parallel.process_group)
    return RankGroup.of(param for model in models for param in model.parameters())


def _bytes_by_kind(storages: Iterable[ParkedStorage]) -> dict[Kind, int]:
    sizes: dict[Kind, int] = {}
    for each in storages:
        sizes[each.kind] = sizes.get(each.kind, 0) + each.size_bytes
    return sizes
