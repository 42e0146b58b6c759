# SPDX-License-Identifier: Apache-2.0
"""What leaves the GPU at each value of a trainer's setting: a number of blocks, or a share of the Linear weights.

Only arithmetic on sizes that the readers `swapping.py` and `shares.py` found.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

_TENSOR_SHARE = 0.10  # of OneTrainer's cache may be overhead, by its StaticLayerAllocator
_MOST_CACHES = 10


class BlockList(NamedTuple):
    """A list of `length` equal blocks, sizes in bytes of one: `moved` leaves the GPU as it swaps, `stays` does not.

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
    """One value of the setting: bytes of weights that are off the GPU, once, and of buffers for them on it."""

    value: float
    moved_bytes: int
    buffer_bytes: int


class Run(NamedTuple):
    """What a plan says of every such run. `asked` is the input's own value.

    `beside` are other settings that the option needs, `smaller` is what else makes the run smaller, and `times` how
    often a step brings each weight. `is_one_way` says that no weight is copied back. `inactive_bytes` are those of
    Wan 2.2's other expert, which waits on the host.
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

    `extra_single` is what the program adds to the single blocks, and `ring` the buffers for moved blocks that each list
    has on the GPU. `by_ratio` says that the program divides by the lengths of its lists, `from_the_end` that its lists
    are one, of which the last blocks leave and `keeps` stay.
    """

    run: Run
    keeps: int
    extra_single: int = 0
    ring: int = 0
    by_ratio: bool = False
    from_the_end: bool = False
    unit: str = "blocks"

    def steps(self) -> Iterator[Step]:
        """Yield each number of blocks that the program's own assertion lets pass, from 0."""
        for blocks in range(self.most + 1):
            if self.is_allowed(blocks):
                parts = list(zip(self.run.lists, self.split(blocks), strict=True))
                moved = sum(out * each.moved_bytes for each, out in parts)
                buffers = sum(min(self.ring, out) * each.moved_bytes for each, out in parts)
                yield Step(blocks, moved, buffers)

    def split(self, blocks: int) -> tuple[int, ...]:
        """Return how many of each list swap for `--blocks_to_swap blocks`: half double, the rest two single each."""
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
        """Divide by the lists' lengths; of what one list cannot give, two single blocks stand for a double one."""
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
        """Return what OneTrainer keeps off the GPU, never the two layers that it needs, and its cache's overhead."""
        lists = self.run.lists
        total = self.rest_moved_bytes + sum(each.length * each.moved_bytes for each in lists)
        loaded = max(int(total * (1 - share)), 2 * max(each.moved_bytes for each in lists))
        largest = max(each.largest_bytes for each in lists)
        caches = min(
            math.ceil(loaded * _TENSOR_SHARE / largest), math.ceil(loaded / (2 * largest)), _MOST_CACHES
        )
        return max(total - loaded, 0), caches * largest

    def _modules(self, percent: int) -> int:
        """Return the bytes of the modules that leave: of each list its share, or in order until their number is met."""
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
        """Return what the device holds of weights on their way: `slots` of the mean size, in 16 bits."""
        return self.slots * max(each.wide_bytes // each.linears for each in self.run.lists)


OnHost = BlockSwap | LayerShare
