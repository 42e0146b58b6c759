# SPDX-License-Identifier: Apache-2.0
"""The matrices of one shape that run in one call, with the bits of one call each.

A library may choose another kernel for the product of several matrices than for one of them. So each batch is tried
before the first step, on matrices of its own, and is used only if its bits equal those of one matrix after the other.
The trial has enough elements to meet a rounding that differs rarely. Tiny matrices have too few, and run one by one.
On one H200 they were, for eight shapes from (128, 128) to (6144, 2048) and 2 to 24 matrices. On CPUs they are for all
but one of some hundred matrices: another sum, now and then another rounding, which no trial excludes. So there are
none.

A batch takes no memory more: it is as long as the scratch of the longest matrix allows.

Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms.matrices import ShardedMatrixAlgorithm, Work, is_in_parts

# Beyond so many the host has little left to save.
_MOST = 32
# Compared in all, in at most so many trials.
_TRIED_ELEMENTS, _MOST_TRIALS = 2**17, 8


class MatrixKind(NamedTuple):
    """Matrices that one call may transform: of one formula, shape and layout."""

    algorithm: ShardedMatrixAlgorithm
    shape: tuple[int, int]
    stride: tuple[int, int]

    def stack(self, count: int, work: Work) -> torch.Tensor:
        """Return so many matrices of any values, one behind the other."""
        rows, columns = self.shape
        flat = work.new((count, rows * columns), self.algorithm.crosses_as)
        return flat.as_strided((count, rows, columns), (rows * columns, *self.stride))

    def bytes_of(self, count: int, widened_bytes: int) -> int:
        """Return the bytes of scratch of a batch, beside one matrix's moments in fp32."""
        work = Work(None, lambda kernel, *given, **options: kernel(*given, **options), None)
        self.algorithm.of_whole(self.stack(count, work), self.algorithm.defaults, work)
        return work.used_bytes + widened_bytes


def has_batches(device: Device) -> bool:
    """Return whether products of several matrices give the bits of one by one on `device` wherever a trial says so."""
    return device.is_accelerator


class Batches:
    """The batches that give the bits of one matrix after the other. Its methods use the live current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._most: dict[MatrixKind, int] = {}
        self._exact: dict[tuple[MatrixKind, int], bool] = {}

    def learn(
        self, runs: Iterable[Sequence[MatrixKind | None]], buffer: torch.Tensor, widened_bytes: int
    ) -> None:
        """Try the batches of `runs`, the matrices of each chunk in their order, in the scratch `buffer`.

        `widened_bytes` are the bytes of the longest matrix's moments in fp32, if they are stored in fewer bits. The
        host waits for the device, and memory is allocated for a while.
        """
        if not has_batches(self._device):
            return
        self._most.clear()
        listed = list(runs)
        for each in {kind for run in listed for kind in run if kind is not None}:
            size_bytes = partial(each.bytes_of, widened_bytes=widened_bytes)
            fitting = bisect_right(range(1, _MOST + 1), buffer.numel(), key=size_bytes)
            self._most[each] = max(fitting, 1)
        for run in listed:
            for kind, places in self._divided(run):
                if kind is not None and len(places) > 1 and (kind, len(places)) not in self._exact:
                    self._exact[kind, len(places)] = self._is_exact(kind, len(places), buffer)

    def of(self, kinds: Sequence[MatrixKind | None]) -> Iterator[tuple[MatrixKind | None, Sequence[int]]]:
        """Yield the matrices that run together, by their places in `kinds`: several of one kind, or one by itself."""
        for kind, places in self._divided(kinds):
            if kind is not None and self._exact.get((kind, len(places)), False):
                yield kind, places
            else:
                yield from ((kind, [place]) for place in places)

    def _divided(
        self, kinds: Sequence[MatrixKind | None]
    ) -> Iterator[tuple[MatrixKind | None, Sequence[int]]]:
        alike: dict[MatrixKind | None, list[int]] = {}
        for place, kind in enumerate(kinds):
            alike.setdefault(kind, []).append(place)
        for kind, places in alike.items():
            most = 1 if kind is None else self._most.get(kind, 1)
            yield from ((kind, places[first : first + most]) for first in range(0, len(places), most))

    def _is_exact(self, kind: MatrixKind, count: int, buffer: torch.Tensor) -> bool:
        """Return whether trials show that batches give the bits of one matrix after the other."""
        trials = -(-_TRIED_ELEMENTS // (count * prod(kind.shape)))
        return trials <= _MOST_TRIALS and all(
            self._gives_the_bits(kind, count, buffer, seed) for seed in range(trials)
        )

    def _gives_the_bits(self, kind: MatrixKind, count: int, buffer: torch.Tensor, seed: int) -> bool:
        """Return whether a batch of matrices of noise gets the same bits as each of them by itself."""
        on, algorithm = self._device.torch_device, kind.algorithm
        generator = torch.Generator(on).manual_seed(seed)
        noise = torch.randn((count, *kind.shape), generator=generator, dtype=algorithm.crosses_as, device=on)
        work = Work(buffer, self._device.launch, None)
        together = kind.stack(count, work).copy_(noise)
        found = algorithm.of_whole(together, algorithm.defaults, work).clone()
        for each, expected in zip(noise.unbind(), found.unbind(), strict=True):
            work.reuse()
            (single,) = kind.stack(1, work).copy_(each).unbind()
            if not torch.equal(algorithm.of_whole(single, algorithm.defaults, work), expected):
                return False
        return True


def kind_of(algorithm: object, shape: Sequence[int], stride: Sequence[int]) -> MatrixKind | None:
    """Return the kind of a matrix; None where its formula does not say how it uses the whole one."""
    if not is_in_parts(algorithm):
        return None
    (rows, columns), (first, second) = shape, stride
    return MatrixKind(algorithm, (rows, columns), (first, second))
