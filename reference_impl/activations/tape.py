# SPDX-License-Identifier: Apache-2.0
"""A tape of a forward's operations: it can recompute single results.

Checkpointing recomputes whole layers. With the tape a single saved tensor is replaced by the operation that
made it: a norm's output, an activation function, a product of two saved factors cost little more than reading
their inputs. An operation is replayed below autograd with the same inputs, so the result has the same bits.

The results of custom kernels, compiled code, random operations and in-place writes cannot be recomputed. A kernel that
writes a tensor unseen by PyTorch would make a recipe wrong; `profile` verifies each recipe.

Recording an operation takes the host longer than many kernels run. A plan recomputes the same results in every run. So
a run records only the operations used by recipes of earlier runs, found by their number. If a model calls other
operations than before, a recipe is missing: its result is copied instead, and the next runs record everything.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl.activations.geometry import Geometry, VersionProbe, Weights, flat_bytes
from reference_impl.activations.run import MovedTensor, SavedStorage
from reference_impl.activations.tokens import KeptTensor
from reference_impl.device import REACHED, Device, Event, Mark

_MOST_UNSAVED_ANCESTORS = 8


class Restorable(Protocol):
    """An input of a replay."""

    def restore(self) -> torch.Tensor:
        """Return it on the device."""


class Operation:
    """One call of one operator, its tensors replaced by `Input`s; with the marks around a timed one.

    `number` is its place among the calls of its run.
    """

    __slots__ = ("args", "function", "inputs", "kwargs", "marks", "number")

    def __init__(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Input],
        marks: tuple[Mark, Mark] | None,
        *,
        number: int,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.marks = marks
        self.number = number

    def seconds(self) -> float:
        """Return how long a timed call took; waits for its end."""
        assert self.marks is not None
        began, ended = self.marks
        return began.seconds_until(ended)

    @property
    def name(self) -> str:
        """The operator's name, without namespace and overload."""
        return str(self.function.name()).partition("::")[2].partition(".")[0]


class Node:
    """One storage: the operation that made it, and whether the engine has moved or kept it."""

    __slots__ = ("kept", "operation", "output", "saved")

    def __init__(self, operation: Operation | None = None, output: int = 0) -> None:
        self.operation = operation
        self.output = output
        self.saved: weakref.ref[SavedStorage] | None = None
        self.kept: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def name(self) -> str:
        """The operator that made it; `input` if none was seen."""
        return "input" if self.operation is None else self.operation.name


class Input:
    """A tensor argument: held if it is small or a weight, else a geometry over its storage's node."""

    __slots__ = ("geometry", "kept", "node", "probe")

    def __init__(self, tensor: torch.Tensor, node: Node | None) -> None:
        """Hold `tensor` when it has no `node`."""
        self.node = node
        self.kept = KeptTensor(tensor) if node is None else None
        self.geometry = Geometry.of(tensor) if node is not None else None
        self.probe = VersionProbe(tensor) if node is not None else None


class Tape(TorchDispatchMode):
    """Records operations while it is active. Each plan has its own tape, since it recomputes other results."""

    def __init__(self, device: Device, weights: Weights, *, min_bytes: int) -> None:
        """Hold tensors below `min_bytes` and weights themselves; time operations of `device`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._weights = weights
        self._min_bytes = min_bytes
        # While the engine itself calls operations.
        self.is_paused = False
        # Marks cost more than many an operation.
        self.is_timing = False
        self._nodes: dict[int, tuple[weakref.ref[torch.UntypedStorage], Node]] = {}
        self._calls = 0
        # Numbers of the calls that recipes have repeated, and of the calls to record in this run; None for all.
        self._used: set[int] = set()
        self._wanted: set[int] | None = None
        self._has_missed = False
        # Runs to come that record everything, and how many more after the next miss.
        self._whole_runs, self._after_a_miss = 0, 1

    def start_run(self) -> None:
        """Forget the record of the last run; recipes that were given out live on."""
        self._nodes.clear()
        if self._has_missed:
            # A model that alternates between several forms has shown each of them after some doublings.
            self._whole_runs, self._after_a_miss = self._after_a_miss, 2 * self._after_a_miss
        self._wanted = None if self._whole_runs or not self._used else self._used
        self._whole_runs = max(self._whole_runs - 1, 0)
        self._calls, self._has_missed = 0, False

    def recipe(self, storage: torch.UntypedStorage) -> Recipe | None:
        """Return a recipe for a living storage, and record it in later runs too; None where there is none."""
        found = recipe_for(self.node_of(storage))
        if found is None:
            self._has_missed = True
        else:
            self._used.update(operation.number for operation in found.operations)
        return found

    def node_of(self, storage: torch.UntypedStorage) -> Node:
        """Return the node of a living storage."""
        known = self._nodes.get(storage._cdata)
        if known is not None and known[0]() is storage:
            return known[1]
        return self._remember(storage, Node())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        self._calls += 1
        number = self._calls
        if self._wanted is not None and number not in self._wanted and not _writes(func):
            return func(*args, **kwargs)
        if not _is_replayable(func, args, kwargs):
            result = func(*args, **kwargs)
            if _writes(func):
                _each(torch.Tensor, self._forget, (args, kwargs))
            return result
        began = self._device.mark() if self.is_timing else None
        result = func(*args, **kwargs)
        marks = None if began is None else (began, self._device.mark())
        made = [
            (output, tensor.untyped_storage())
            for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,))
            # A smaller result never moves, and is held wherever it is an input.
            if _is_strided(tensor) and tensor.nbytes >= self._min_bytes
        ]
        if made:
            self._record(func, args, kwargs, made, marks, number)
        return result

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        made: list[tuple[int, torch.UntypedStorage]],
        marks: tuple[Mark, Mark] | None,
        number: int,
    ) -> None:
        """Record a call of `func`, which writes no argument; `made` has (output's number, storage) of each result."""
        inputs: list[Input] = []
        # An operator may return a view of its input without declaring it.
        given_storages: set[int] = set()
        untracked: list[torch.Tensor] = []

        def as_input(tensor: torch.Tensor) -> Input | torch.Tensor:
            if tensor.is_inference():
                untracked.append(tensor)
                return tensor
            inputs.append(self._as_input(tensor, given_storages))
            return inputs[-1]

        # Below autograd an alias has a version counter of its own, unless this key is back in.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            given_args, given_kwargs = _each(torch.Tensor, as_input, (args, kwargs))
        if untracked:
            # They have no version to tell of a write. Nor has a result of inference mode, which no backward needs.
            return
        operation = Operation(func, given_args, given_kwargs, inputs, marks, number=number)
        for output, storage in made:
            if inputs and storage._cdata not in given_storages:
                self._remember(storage, Node(operation, output))

    def _as_input(self, tensor: torch.Tensor, storages: set[int]) -> Input:
        """Return the `Input` for `tensor`; add its storage to `storages`."""
        if not _is_strided(tensor):
            return Input(tensor, None)
        storage = tensor.untyped_storage()
        storages.add(storage._cdata)
        is_held = tensor.nbytes < self._min_bytes or storage._cdata in self._weights
        return Input(tensor, None if is_held else self.node_of(storage))

    def _remember(self, storage: torch.UntypedStorage, node: Node) -> Node:
        self._nodes[storage._cdata] = (weakref.ref(storage), node)
        return node

    def _forget(self, tensor: torch.Tensor) -> None:
        if _is_strided(tensor):
            self._nodes.pop(tensor.untyped_storage()._cdata, None)


class Recipe:
    """A result computed again from its inputs: saved or kept tensors, weights, or recipes themselves."""

    __slots__ = ("_inputs", "_operation", "_output", "operations")

    may_come_early = False

    def __init__(self, operation: Operation, output: int, inputs: dict[Input, Restorable]) -> None:
        self._operation = operation
        self._output = output
        self._inputs = inputs
        self.operations: list[Operation] = [operation]
        for restorable in inputs.values():
            if isinstance(restorable, _RecipeView):
                self.operations += restorable.recipe.operations

    def sources(self) -> set[int]:
        """Return the numbers of the saved storages read by it."""
        found: set[int] = set()
        for restorable in self._inputs.values():
            if isinstance(restorable, _RecipeView):
                found |= restorable.recipe.sources()
            elif isinstance(restorable, MovedTensor):
                found.add(restorable.storage_index)
        return found

    def seconds(self) -> float:
        """Return how long its operations took when they were timed; waits for their end."""
        return sum(operation.seconds() for operation in self.operations)

    def compute(self) -> torch.Tensor:
        """Return the result in new memory of the live current stream."""
        restored = {given: restorable.restore() for given, restorable in self._inputs.items()}
        given = self._operation.args, self._operation.kwargs
        args, kwargs = _each(Input, restored.__getitem__, given)
        device_type = next(iter(restored.values())).device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            result = self._operation.function(*args, **kwargs)
        output = result[self._output] if isinstance(result, (tuple, list)) else result
        assert isinstance(output, torch.Tensor)
        return output

    def bring(self) -> tuple[torch.Tensor, Event]:
        """Compute; the event is reached, since it runs on the live current stream."""
        storage = self.compute().untyped_storage()
        return flat_bytes(storage, 0, int(storage.nbytes())), REACHED

    def prepare(self) -> None:
        """Do nothing: the inputs come early by themselves."""

    def release(self) -> None:
        """Let the inputs go."""
        self._inputs.clear()


class _RecipeView:
    """A view of an intermediate result that nobody saved."""

    __slots__ = ("_geometry", "recipe")

    def __init__(self, recipe: Recipe, geometry: Geometry) -> None:
        self.recipe = recipe
        self._geometry = geometry

    def restore(self) -> torch.Tensor:
        return self._geometry.over(self.recipe.compute().untyped_storage())


def recipe_for(node: Node, *, ancestors: int = _MOST_UNSAVED_ANCESTORS) -> Recipe | None:
    """Return a recipe for `node`'s storage whose inputs are all at hand, or None."""
    if node.operation is None or ancestors == 0:
        return None
    inputs: dict[Input, Restorable] = {}
    for given in node.operation.inputs:
        restorable = _restorable(given, ancestors)
        if restorable is None:
            return None
        inputs[given] = restorable
    return Recipe(node.operation, node.output, inputs)


def _restorable(given: Input, ancestors: int) -> Restorable | None:
    if given.kept is not None:
        return given.kept
    assert given.node is not None
    assert given.geometry is not None
    assert given.probe is not None
    if not given.probe.is_current:
        return None
    saved = given.node.saved() if given.node.saved is not None else None
    if saved is not None and saved.is_whole and saved.version == given.probe.version:
        return MovedTensor(saved, given.geometry, given.probe)
    kept = given.node.kept() if given.node.kept is not None else None
    if kept is not None:
        return KeptTensor(given.geometry.over(kept))
    recipe = recipe_for(given.node, ancestors=ancestors - 1)
    return _RecipeView(recipe, given.geometry) if recipe is not None else None


def _is_replayable(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `func` makes new tensors from its inputs alone, the same each time."""
    if not _makes_new(func):
        return False
    if _is_random(func):
        return bool(_argument(func, args, kwargs, "dropout_p") == 0)
    return not _writes_statistics(func, args, kwargs)


def _writes_statistics(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a batch norm writes its running statistics, of which its schema says nothing."""
    if _argument(func, args, kwargs, "running_mean") is None:
        return False
    names = {argument.name for argument in func._schema.arguments} & {"training", "train", "use_input_stats"}
    return not names or any(_argument(func, args, kwargs, name) for name in names)


@cache
def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@cache
def _makes_new(func: Any) -> bool:
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable:
        return False
    if any(returned.alias_info is not None for returned in schema.returns):
        return False
    # A new tensor without contents is there to be written, perhaps by a kernel that the tape does not see.
    return not any(word in func.name() for word in ("empty", "zeros", "ones", "full", "new_"))


@cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _argument(func: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Return the argument called `name` of a call; None where there is none."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _is_strided(leaf: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _each(kind: type, change: Callable[[Any], Any], given: Any) -> Any:
    """Return a list, tuple or dict of arguments with `change` of everything of `kind` in it, however deep.

    torch's own tree_map looks up how to flatten each of them, which takes longer than many an operation.
    """
    if isinstance(given, dict):
        return dict(zip(given, _each(kind, change, list(given.values())), strict=True))
    changed = [
        change(each)
        if isinstance(each, kind)
        else _each(kind, change, each)
        if isinstance(each, (list, tuple, dict))
        else each
        for each in given
    ]
    return changed if isinstance(given, list) else tuple(changed)
