"""Makes slabs ahead of their use, with several threads, so that a first step does not wait for page-locking.

Touching fresh pages is bound by the kernel's zeroing, which runs side by side in as many threads; registering them
with the driver then overlaps with the touching of the next. Nothing here knows how much will be needed: `arena` is
told, and orders.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from reference_impl.device import Device
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.slab import TOUCHING_THREADS, Slab


class SlabSupply:
    """Slabs in the order in which they were ordered; each is made by one thread."""

    def __init__(self, device: Device, *, remedy: str, pinned: bool) -> None:
        """Order nothing yet."""
        self._device = device
        self._remedy = remedy
        self._pinned = pinned
        self._pool: ThreadPoolExecutor | None = None
        self._orders: deque[tuple[int, Future[Slab]]] = deque()

    @property
    def ordered_bytes(self) -> int:
        """Bytes that were ordered and not taken yet."""
        return sum(size_bytes for size_bytes, _ in self._orders)

    def order(self, size_bytes: int) -> None:
        """Have a slab of `size_bytes` made in the background."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                TOUCHING_THREADS, "make-slab", initializer=self._device.use_in_thread
            )
        made = self._pool.submit(
            Slab, self._device, size_bytes, remedy=self._remedy, pinned=self._pinned, touching_threads=1
        )
        self._orders.append((size_bytes, made))

    def take(self) -> Slab | None:
        """Return the slab that was ordered first, once it is made; None when there is none, or no room for it."""
        if not self._orders:
            return None
        _, made = self._orders.popleft()
        try:
            return made.result()
        except (HostMemoryError, RuntimeError, CancelledError):
            # An order is a guess: whoever truly needs the memory asks for it and gets the error.
            self.close()
            return None
        finally:
            if not self._orders:
                self._stop()

    def close(self) -> None:
        """Forget all orders. Calling it again does nothing."""
        orders = list(self._orders)
        self._orders.clear()
        for _, made in orders:
            made.cancel()
        for _, made in orders:
            if not made.cancelled() and made.exception() is None:
                made.result().close()
        self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
