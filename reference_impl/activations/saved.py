"""What autograd holds in place of a saved tensor.

`pack` answers with a token: a `KeptTensor`, which is still on the device, or a `MovedTensor`, a geometry over
a `SavedStorage`. A storage leaves once however many tensors view it, and everything belongs to the tokens:
when the last one of a storage dies, with or without a backward, its host block and its device buffer return
by themselves. Nothing here decides what moves; `engine` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from reference_impl.activations.geometry import Extent, Geometry
from reference_impl.device import REACHED, Event

if TYPE_CHECKING:
    from reference_impl.activations.run import Run


class Source(Protocol):
    """Where a storage's bytes come from when they are needed again."""

    @property
    def may_come_early(self) -> bool:
        """Whether bringing them back ahead of their use saves time."""

    def bring(self) -> tuple[torch.Tensor, Event]:
        """Return flat uint8 memory of the live current stream, and the event after which it holds the bytes."""

    def prepare(self) -> None:
        """Start what must run before `bring` is quick."""

    def release(self) -> None:
        """Give up the bytes. Safe in a finalizer."""


class VersionProbe:
    """Follows a tensor's in-place version without keeping its memory alive.

    Autograd cannot check versions through hooks, and a copy on its way to the host would miss or tear a write
    that comes after the save: without this check the gradient would be wrong in silence.
    """

    __slots__ = ("_alias", "_saved_version", "_what")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Remember the version of now."""
        alias = tensor.detach()
        # A detached alias shares the version counter; with its data swapped it holds no memory of the tensor.
        alias.data = _empty(tensor.device)
        self._alias = alias
        self._saved_version = tensor._version
        self._what = (tensor.dtype, tuple(tensor.shape))

    @property
    def version(self) -> int:
        """The version that was saved."""
        return self._saved_version

    @property
    def is_current(self) -> bool:
        """Whether nothing has written the tensor since."""
        return self._alias._version == self._saved_version

    def check(self) -> None:
        """Raise RuntimeError, as eager autograd does, when the tensor was written after it was saved."""
        check_version(self._alias._version, self._saved_version, self._what)


@cache
def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


def check_version(now: int, saved: int, what: tuple[torch.dtype, tuple[int, ...]]) -> None:
    """Raise RuntimeError when `now` is not the `saved` version of the tensor described by `what`."""
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a {what[0]} tensor of shape {what[1]} is at version {now}; expected version {saved}; "
            "try the out-of-place form of the operation that wrote it"
        )


class KeptTensor:
    """A saved tensor that stays where it is."""

    __slots__ = ("_saved_version", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the tensor: a leaf itself, since its data may be swapped; else an alias, which closes no cycle."""
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._saved_version = tensor._version

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError when it was written after it was saved."""
        tensor = self._tensor
        if tensor._version != self._saved_version:
            check_version(tensor._version, self._saved_version, (tensor.dtype, tuple(tensor.shape)))
        return tensor


class AwaitedTensor(KeptTensor):
    """A weight that may have to be brought back before it is used."""

    __slots__ = ("_bring",)

    def __init__(self, tensor: torch.Tensor, bring: Callable[[], None]) -> None:
        """Hold the tensor; call `bring` before each use."""
        super().__init__(tensor)
        self._bring = bring

    def restore(self) -> torch.Tensor:
        """Bring the weight back and return it."""
        self._bring()
        return super().restore()


class MovedTensor:
    """A saved tensor as a geometry over a `SavedStorage`."""

    __slots__ = ("_geometry", "_probe", "_saved", "round")

    def __init__(self, saved: SavedStorage, geometry: Geometry, probe: VersionProbe) -> None:
        """Describe a tensor whose bytes `saved` stands for."""
        self._saved = saved
        self.round = saved.join()
        self._geometry = geometry
        self._probe = probe

    @property
    def storage_index(self) -> int:
        """The number of its storage in the run."""
        return self._saved.index

    def restore(self) -> torch.Tensor:
        """Return a tensor with the saved values and strides on the device; the live current stream may use it.

        Raises RuntimeError when the original was written after it was saved.
        """
        self._probe.check()
        flat = self._saved.fetch(self)
        if self._saved.is_compact:
            return self._geometry.spread(flat)
        shift = int(flat.storage_offset()) - self._saved.start
        return self._geometry.over(flat.untyped_storage(), shifted_bytes=shift)

    def __del__(self) -> None:
        self._saved.leave(self)


class SavedStorage:
    """The bytes of one extent, gone from the device and brought back from `source` on demand.

    The device buffer is held until every token has been restored from it once, so that q, k and v of one
    projection, or one norm output under two linears, come back once. A backward over a retained graph is a new
    round, which brings them again.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_device",
        "_is_ahead",
        "_is_awaited",
        "_is_whole",
        "_live_tokens",
        "_loaded",
        "_on_device",
        "_run",
        "_stream",
        "_unserved_tokens",
        "index",
        "is_compact",
        "origin",
        "round",
        "size_bytes",
        "source",
        "start",
        "version",
    )

    def __init__(
        self, run: Run, extent: Extent, source: Source, *, version: int, in_flight: torch.Tensor | None
    ) -> None:
        """Stand for `extent` at in-place `version`; `in_flight` is what a copy out may still be reading."""
        self._device = run.device
        self._run = run
        self.source = source
        self.start = extent.start
        self.size_bytes = extent.size_bytes
        self.is_compact = extent.is_compact
        self._is_whole = extent.is_whole
        self.origin = weakref.ref(extent.storage)
        self.version = version
        # While the copy is in flight the original is alive, and a backward that comes so soon uses it again.
        self._on_device = None if in_flight is None else weakref.ref(in_flight)
        self._buffer: torch.Tensor | None = None
        self._loaded: Event = REACHED
        # On the device before it was asked for.
        self._is_ahead = False
        self._is_awaited = True
        self._stream = self._device.current_stream_id()
        self._live_tokens = 0
        self._unserved_tokens = 0
        self.round = 0
        self.index = run.add(self)

    @property
    def is_whole(self) -> bool:
        """Whether this is a whole storage, not a part."""
        return self._is_whole

    def join(self) -> int:
        """Count a new token; return the round in which it is to be served."""
        self._live_tokens += 1
        self._unserved_tokens += 1
        return self.round

    def leave(self, token: MovedTensor) -> None:
        """Forget a token that died."""
        self._live_tokens -= 1
        if token.round == self.round:
            self._served_one()

    @property
    def is_held(self) -> bool:
        """Whether the bytes are on the device for backward."""
        return self._buffer is not None

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are on the device, perhaps only until their copy out is over."""
        return self.is_held or (self._on_device is not None and self._on_device() is not None)

    def hold(self) -> None:
        """Hold the bytes for backward: those that still are on the device, or else a copy that begins now."""
        if self._buffer is not None:
            return
        original = None if self._on_device is None else self._on_device()
        if original is None:
            self.load()
        else:
            self._run.take_over(original)
            self._buffer = original
            self._count_ahead(True)

    def load(self) -> None:
        """Start bringing the bytes to the device, into memory of the live current stream."""
        self._stream = self._device.current_stream_id()
        buffer, self._loaded = self.source.bring()
        self._on_device = weakref.ref(buffer)
        self._is_awaited = False
        self._buffer = buffer
        self._count_ahead(True)

    def fetch(self, token: MovedTensor) -> torch.Tensor:
        """Return the bytes on the device for `token`, ready on the live current stream."""
        run = self._run
        if run.is_proving:
            return self._bring(token)
        if run.observer is not None:
            run.observer.fetching()
        run.ask(self.index, self.round)
        flat = self._bring(token)
        run.prefetch(after_copy=self.source.may_come_early)
        if run.observer is not None:
            run.observer.fetched(self.index, flat)
        return flat

    def _bring(self, token: MovedTensor) -> torch.Tensor:
        self.hold()
        if not self._run.is_proving:
            self._count_ahead(False)
        flat = self._buffer
        assert flat is not None
        self._device.wait(self._loaded)
        self._is_awaited = True
        if self._stream != self._device.current_stream_id():
            flat = self._run.copy_for_this_stream(flat)
        if token.round == self.round:
            token.round += 1
            self._served_one()
        return flat

    def _count_ahead(self, is_ahead: bool) -> None:
        if is_ahead != self._is_ahead:
            self._is_ahead = is_ahead
            self._run.ahead_bytes += self.size_bytes if is_ahead else -self.size_bytes

    def _served_one(self) -> None:
        self._unserved_tokens -= 1
        if self._unserved_tokens == 0:
            self.round += 1
            self._unserved_tokens = self._live_tokens
            self._drop_buffer()

    def _drop_buffer(self) -> None:
        if self._buffer is None:
            return
        self._count_ahead(False)
        if not self._is_awaited:
            # No stream that may reuse this memory has been told to wait for the copy that still writes it.
            self._run.abandon(self._loaded, self._buffer)
        self._buffer = None

    def __del__(self) -> None:
        self._drop_buffer()
        self.source.release()
