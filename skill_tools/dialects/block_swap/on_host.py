# SPDX-License-Identifier: Apache-2.0
"""The bytes off the GPU at each value of a trainer's setting: a number of blocks, or a share of the Linear weights.

Only arithmetic on the sizes from the readers `swapping.py` and `shares.py`.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

_TENSOR_SHARE = 0.10  # of OneTrainer's cache may be overhead, by its StaticLayerAllocator
_MOST_CACHES = 10


class BlockList(NamedTuple):
    """A list of `length` equal blocks, sizes in bytes of one: `moved` leaves the GPU in a swap, `stays` does not.

    The moved bytes belong to `linears` Linear modules: `wide_bytes` in 16 bits, `largest_bytes` of the largest.
    """

    name: str
    length: int
    moved_bytes: int
    stays_bytes: int
    linears: int
    largest_bytes: int
    wide_bytes: int


class Step(NamedTuple):
    """One value of the setting: bytes of weights off the GPU, counted once, and of buffers for them on it."""

    value: float
    moved_bytes: int
    buffer_bytes: int


class Run(NamedTuple):
    """The facts of a run with blocks on the host. `asked` is the input's own value.

    `beside` are other settings that the option needs, `smaller` names other ways to a smaller run, and `times` counts
    the copies of each weight in a step. `is_one_way`: no weight is copied back. `inactive_bytes` are those of Wan 2.2's
    other expert, which waits on the host.
    """

    label: str
    weights: str
    lists: tuple[BlockList, ...]
    rest_bytes: int
    lora_bytes: int
    rank: int
    asked: float
    option: str
    beside: str
    smaller: str
    times: int
    is_one_way: bool
    is_pinned: bool
    inactive_bytes: int
    assumptions: tuple[str, ...]


class BlockSwap(NamedTuple):
    """Whole blocks. `keeps` of each list stay on the GPU.

    `extra_single` counts the program's further single blocks, `ring` each list's buffers for moved blocks on the GPU.
    `by_ratio`: the program divides by the lengths of its lists. `from_the_end`: its lists are one; the last blocks
    leave and `keeps` stay.
    """

    run: Run
    keeps: int
    extra_single: int = 0
    ring: int = 0
    by_ratio: bool = False
    from_the_end: bool = False
    unit: str = "blocks"

    def steps(self) -> Iterator[Step]:
        """Yield each number of blocks that the program's own assertion allows, from 0."""
        for blocks in range(self.most + 1):
            if self.is_allowed(blocks):
                parts = list(zip(self.run.lists, self.split(blocks), strict=True))
                moved = sum(out * each.moved_bytes for each, out in parts)
                buffers = sum(min(self.ring, out) * each.moved_bytes for each, out in parts)
                yield Step(blocks, moved, buffers)

    def split(self, blocks: int) -> tuple[int, ...]:
        """Return each list's swapped blocks for `--blocks_to_swap blocks`: half double, the rest two single each."""
        if len(self.run.lists) == 1 or not blocks:
            return (blocks,) * len(self.run.lists)
        if self.from_the_end:
            last = min(blocks, self.run.lists[-1].length)
            return blocks - last, last
        if self.by_ratio:
            return self._split_by_ratio(blocks)
        double = blocks // 2
        return double, 2 * (blocks - double) + self.extra_single

    def _split_by_ratio(self, blocks: int) -> tuple[int, int]:
        """Divide by the lists' lengths; two single blocks replace a double one that a list cannot give."""
        lengths = [each.length for each in self.run.lists]
        ratio = lengths[1] / lengths[0]
        double = round(blocks / (1 + ratio / 2))
        single = round(double * ratio)
        if 2 * lengths[0] < lengths[1]:
            more = max(double - (lengths[0] - self.keeps), 0)
            double, single = double - more, single + 2 * more
        else:
            more = max(math.ceil((single - (lengths[1] - self.keeps)) / 2), 0)
            double, single = double + more, single - 2 * more
        return (double, single) if double or single else (0, 1)

    @property
    def most(self) -> int:
        """The largest `--blocks_to_swap` that is allowed."""
        return max(n for n in range(sum(each.length for each in self.run.lists)) if self.is_allowed(n))

    def is_allowed(self, blocks: int) -> bool:
        """Return whether the program's own assertion lets `--blocks_to_swap blocks` pass."""
        if self.from_the_end:
            return blocks <= sum(each.length for each in self.run.lists) - self.keeps
        parts = zip(self.run.lists, self.split(blocks), strict=True)
        return not blocks or all(swapped <= each.length - self.keeps for each, swapped in parts)


class LayerShare(NamedTuple):
    """A share of the Linear weights, in hundredths; `rest_moved_bytes` are weights beside the blocks that leave too.

    `in_order` says that the first modules leave, not each with the same chance. `slots` are the weights of 16 bits that
    the device holds as they come. OneTrainer has `whole_layers` instead, in a cache of which a part is overhead.
    """

    run: Run
    rest_moved_bytes: int
    unit: str
    slots: int = 0
    in_order: bool = False
    whole_layers: bool = False

    def steps(self) -> Iterator[Step]:
        """Yield each hundredth from 0 to 1."""
        yield Step(0, 0, 0)
        for percent in range(1, 101):
            value = percent if self.unit == "percent" else percent / 100
            if self.whole_layers:
                moved, buffers = self._layers(percent / 100)
            else:
                moved, buffers = self._modules(percent), self._slot_bytes()
            yield Step(value, moved, buffers)

    def _layers(self, share: float) -> tuple[int, int]:
        """Return OneTrainer's bytes off the GPU, at most all but two layers, and its cache's overhead."""
        lists = self.run.lists
        total = self.rest_moved_bytes + sum(each.length * each.moved_bytes for each in lists)
        loaded = max(int(total * (1 - share)), 2 * max(each.moved_bytes for each in lists))
        largest = max(each.largest_bytes for each in lists)
        caches = min(
            math.ceil(loaded * _TENSOR_SHARE / largest), math.ceil(loaded / (2 * largest)), _MOST_CACHES
        )
        return max(total - loaded, 0), caches * largest

    def _modules(self, percent: int) -> int:
        """Return the bytes of modules off the GPU: of each list its share, or in order up to their number."""
        moved = self.rest_moved_bytes * percent // 100
        if not self.in_order:
            return moved + percent * sum(each.length * each.moved_bytes for each in self.run.lists) // 100
        left = math.ceil(percent * sum(each.length * each.linears for each in self.run.lists) / 100)
        for each in self.run.lists:
            taken = min(left, each.length * each.linears)
            moved += taken * each.moved_bytes // each.linears
            left -= taken
        return moved

    def _slot_bytes(self) -> int:
        """Return the device's bytes for weights in flight: `slots` of the mean size, in 16 bits."""
        return self.slots * max(each.wide_bytes // each.linears for each in self.run.lists)


OnHost = BlockSwap | LayerShare
