# SPDX-License-Identifier: Apache-2.0
"""`SequenceTiles`: modules without mixing between positions run a tile of the sequence at a time.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from offload_arithmetic.sizes import TILE_TOKENS
from reference_impl.activations.attach import Forward, beside_blocks, first_blocks
from reference_impl.activations.recompute import refuse_caches
from reference_impl.memory.compiler import uncompiled
from reference_impl.sequences.attached import DividedCalls, check_whole, named, repeatable_call
from reference_impl.sequences.inside import A_PART
from reference_impl.sequences.position_wise import gains_by_tiles, refuse_mixing
from reference_impl.sequences.positions import Leading
from reference_impl.sequences.tiled_call import TiledCall
from reference_impl.sequences.unneeded_products import UnneededProducts

# A norm takes a few bytes a position, and its kernels less time than the host needs to launch a tile of them.
_TILES_OF_NORMS = 4
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class SequenceTiles(DividedCalls):
    """Modules of `model` run a tile of positions at a time, from the construction to `close()`; a context manager.

    >>> with SequenceTiles(model):
    ...     train(model)

    A module that is named or found runs `tile_tokens` positions at a time, forward and backward: only one tile's
    intermediates are alive. Backward computes each tile again. Gradients of weights add up in fp32 and are rounded
    once. Evaluation runs in tiles too.

    The first call longer than a tile tries whether the module is position-wise. It raises ValueError before anything
    is computed for any other module, for a returned tensor without positions (a loss), and for a hook that keeps an
    inner tensor. Backward raises RuntimeError if the module computes with a trained tensor beyond its parameters, and
    for the gradient of a gradient.

    Args:
        model: any module.
        tiles: endings of names of modules: `mlp`, `input_layernorm`, `self_attn.q_norm`. By default they are found
            inside the model's blocks (its outermost `nn.ModuleList`) and beside them. Each is tried at its first longer
            training call. One that is not position-wise, or saves no more than its inputs, runs as it is, and the
            modules inside it are tried.
        tile_tokens: positions of a tile, of every sequence of the batch; of modules without matrices up to four times
            as many.

    Raises ValueError for an ending without a match, a module without a forward, one named module inside another, a
    model without blocks to search, or `tile_tokens` below 1.
    """

    def __init__(
        self, model: nn.Module, tiles: Sequence[str] | None = None, *, tile_tokens: int = TILE_TOKENS
    ) -> None:
        check_whole("tile_tokens", tile_tokens, 1, TILE_TOKENS)
        in_blocks: list[nn.Module] = []
        if tiles is None:
            in_blocks = _modules_in(first_blocks(model, None))
            modules = list(dict.fromkeys([*in_blocks, *_parametrised(beside_blocks(model))]))
        else:
            modules = named(model, "tiles", tiles, "mlp")
            names = {module: name for name, module in model.named_modules()}
            _refuse_nested({module: names[module] for module in modules})
        self.tile_tokens = tile_tokens
        self._finds, self._in_blocks = tiles is None, frozenset(in_blocks)
        # Whether each tried module runs in tiles; a named one does.
        self._runs_in_tiles: dict[nn.Module, bool] = {}
        self._unneeded = UnneededProducts()
        self._named = 0 if tiles is None else len(modules)
        super().__init__(model, modules, longer_than=tile_tokens)

    @property
    def modules_in_tiles(self) -> int:
        """How many modules run in tiles; without names, the number found by now."""
        return self._named or sum(self._runs_in_tiles.values())

    @property
    def reaches_blocks(self) -> bool:
        """Whether modules inside the blocks, or named ones, run in tiles by now: a final norm alone spares little."""
        return bool(self._named) or any(self._runs_in_tiles.get(each) for each in self._in_blocks)

    def _facts(self) -> Mapping[str, str]:
        return {
            "modules in tiles": str(self.modules_in_tiles),
            "positions of a tile": str(self.tile_tokens),
            "status": self._status,
        }

    def _divided(
        self,
        name: str,
        forward: Forward,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
    ) -> Callable[[], Any] | None:
        if not self._tries(name, forward, module, leaves, structure, leading):
            return None
        tile_tokens = self._tile_tokens_of(module, leading)
        forward = A_PART.around(forward)
        call = TiledCall(name, module, forward, leaves, structure, leading, tile_tokens, self._unneeded)
        return partial(uncompiled(call.run), leaves)

    def _tile_tokens_of(self, module: nn.Module, leading: Leading) -> int:
        # Some quantized matrices are buffers.
        if any(each.dim() > 1 for each in (*module.parameters(), *module.buffers())):
            return self.tile_tokens
        most = _TILES_OF_NORMS * self.tile_tokens
        return max(self.tile_tokens, min(most, -(-leading.count // _TILES_OF_NORMS)))

    def _tries(
        self,
        name: str,
        forward: Forward,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
    ) -> bool:
        """Return whether `module` runs in tiles; raise ValueError for one that was named and cannot."""
        if module in self._runs_in_tiles:
            return self._runs_in_tiles[module]
        if self._finds and not torch.is_grad_enabled():
            # The tensors saved for backward are not known yet.
            return False
        call = repeatable_call(forward, module, structure)
        with A_PART.entered():
            if self._finds:
                runs = uncompiled(gains_by_tiles)(name, module, call, leaves, leading)
            else:
                refuse_caches(module, leaves)
                uncompiled(refuse_mixing)(name, module, call, leaves, leading)
                runs = True
        self._runs_in_tiles[module] = runs
        return runs


def _modules_in(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules inside `blocks`, each module once."""
    found = {each: None for block in blocks for each in block.modules() if each is not block}
    return [each for each in found if not isinstance(each, _LISTS)]


def _parametrised(beside: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters among those `beside` the blocks.

    A module without any, such as rotary positions, may depend on the lengths of its calls.
    """
    found = {each: None for other in beside for each in other.modules()}
    return [
        each for each in found if not isinstance(each, _LISTS) and next(each.parameters(), None) is not None
    ]


def _refuse_nested(named: Mapping[nn.Module, str]) -> None:
    """Raise ValueError for modules without a forward, and for one inside another."""
    for module, name in named.items():
        if isinstance(module, _LISTS):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which has no forward; expected modules that are called; try "
                "naming the modules inside it"
            )
        for inner in module.modules():
            if inner is not module and inner in named:
                raise ValueError(
                    f"{named[inner]} is inside {name}, and both are named in tiles; expected one of them, since a tile "
                    f"of one would run in tiles of the other; try {name} alone"
                )
