"""Saves and loads states in the layout of `torch.optim.AdamW`, both ways, at any split.

Parameters are known by a key: running numbers in `torch.optim`, names of parameters in distributed checkpoints.
Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import copy
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.optimizers.algorithms import Algorithm, AnyAlgorithm, MatrixAlgorithm, group_defaults
from reference_impl.optimizers.checks import check_thread
from reference_impl.optimizers.formulas import known_options, matrices_of
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.parameter_state import OptimizerState, StateParts
from reference_impl.optimizers.saved_checks import Groups, check_document, check_groups
from reference_impl.optimizers.state_offload_wrapped import divided, joined
from reference_impl.optimizers.step import in_turn


class SavedOptimizer(HostedOptimizer):
    """A `HostedOptimizer` with torch's `state`, `state_dict` and `load_state_dict`.

    Args:
        params, defaults: as in `torch.optim.Optimizer`.
        algorithm: names the states and hyper-parameters of groups that no formula of matrices updates.
        shows_steps, masters_of_all, passes_over_unknown: see `OptimizerState`.
    """

    _states: OptimizerState | None = None
    # The formula of groups that name none.
    _default_matrices: MatrixAlgorithm | None = None
    _stepped_by: threading.Thread | None = None
    # How many groups each optimizer had that this has taken the place of.
    _group_counts: Sequence[int] = (0,)

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        algorithm: Algorithm,
        *,
        shows_steps: bool,
        masters_of_all: bool = False,
        passes_over_unknown: bool = False,
    ) -> None:
        self._algorithm = algorithm
        # The formula of each group that is updated in matrices.
        self._matrices: list[MatrixAlgorithm | None] = []
        # Writes that a load, or a refresh of masters, has still to make.
        self._unwritten: deque[Callable[[], None]] = deque()
        super().__init__(params, defaults)
        # The states must not keep their owner alive.
        owner = weakref.proxy(self)
        self._states = OptimizerState(
            self._members,
            algorithm,
            lambda members: owner._parts_of(members),
            shows_steps=shows_steps,
            masters_of_all=masters_of_all,
            passes_over_unknown=passes_over_unknown,
        )
        self.register_step_pre_hook(_before_step)

    def _add_with_formula(self, param_group: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Add a group that may name a formula of matrices; `options` are hyper-parameters of groups that lack them.

        A group has the hyper-parameters of its formula alone, as in torch's class.
        """
        matrices = matrices_of(param_group, self._default_matrices)
        algorithm = matrices or self._algorithm
        # Another optimizer may be made of the same groups.
        param_group = {name: value for name, value in param_group.items() if name != "algorithm"}
        given = set(param_group)
        for name, value in {**group_defaults(algorithm), **known_options(algorithm, options)}.items():
            param_group.setdefault(name, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in self.defaults.keys() - group_defaults(algorithm).keys() - given:
            group.pop(name, None)
        self._matrices.append(matrices)

    def _take_back_group(self) -> None:
        """Forget the group that was added last."""
        self.param_groups.pop()
        self._matrices.pop()

    @property
    def _matrices_by_param(self) -> dict[torch.Tensor, MatrixAlgorithm]:
        """The formulas of parameters that are updated in matrices."""
        return {
            param: matrices
            for group, matrices in zip(self.param_groups, self._matrices, strict=True)
            for param in group["params"]
            if matrices is not None
        }

    @property
    def _algorithms(self) -> list[AnyAlgorithm]:
        """The formula of each group."""
        return [matrices or self._algorithm for matrices in self._matrices]

    @abstractmethod
    def _finished(self, members: Iterable[Member]) -> StateParts:
        """Return where states are, once no update of `members` runs. Raises RuntimeError when closed."""

    def written_uncounted(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return those of `members` that others have written past every counter: masters elsewhere show it themselves.

        Whose masters are on the CPU, and whose weights are about to leave the device; waits for it.
        """
        return self._finished(members).written_uncounted(members) if self._follows_writes else ()

    def _parts_of(self, members: Iterable[Member]) -> StateParts:
        if not self._failures.has_turn:
            check_thread(self._stepped_by)
        return self._finished(members)

    def _follow(self, member: Member) -> None:
        self.state.follow(member)

    @abstractmethod
    def _finish_for_saving(self, *, for_writing: bool) -> None:
        """Finish the updates that run, or raise why states cannot be saved, or `for_writing` be loaded, now."""

    def _load(self, groups: list[dict[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Take over groups and states that have been checked."""
        self._finish_for_saving(for_writing=True)
        with deferred_interrupts():
            self.__setstate__({"param_groups": groups})
            self._unwritten = deque(partial(self.state.write, *each) for each in states.items())
            self._write_rest()

    def _write(self, write: Callable[[], None]) -> None:
        """Write masters; after an error the next call does it again."""
        self._unwritten.append(write)
        self._write_rest()

    def _write_rest(self) -> None:
        """Make the writes that a load or a refresh has left; after an error the next call goes on."""
        if not self._unwritten:
            return
        with deferred_interrupts():
            # Writing waits for updates, and whoever waits comes here too.
            writes, self._unwritten = self._unwritten, deque()
            try:
                while writes:
                    writes[0]()
                    writes.popleft()
            finally:
                self._unwritten = writes

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """Each parameter's state, see `OptimizerState`; assigning a mapping replaces all states."""
        assert self._states is not None
        return self._states

    @state.setter
    def state(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        # torch's own constructor assigns an empty one.
        if self._states is not None:
            self._states.replace(states)

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return a consistent snapshot in the layout of `torch.optim.AdamW` (or the algorithm's other class).

        Each parameter has `step` (not SGD's) and the moments in its own shape; parameters that are not fp32 have their
        `master_param` too. Offloaded state comes as CPU tensors. Groups have every key that torch's class has, so that
        it resumes: bitwise where parameters are fp32; others it trains without the master, with moments in their dtype.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._finish_for_saving(for_writing=False)
        self._follow_writes()
        if self._follows_writes:
            members = list(self._members.values())
            for member in self._finished(members).written(members):
                self._follow(member)
        keys: dict[torch.Tensor, int] = {}
        groups = []
        for group, algorithm in zip(self.param_groups, self._algorithms, strict=True):
            for param in group["params"]:
                keys.setdefault(param, len(keys))
            groups.append(
                {
                    **group_defaults(algorithm),
                    **{name: value for name, value in group.items() if name != "params"},
                    # Whatever the user's group says.
                    **algorithm.kernels,
                    "params": [keys[param] for param in group["params"]],
                }
            )
        packed = {"state": {keys[p]: self.state.packed(p) for p in self.state}, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, packed)
            packed = packed if replaced is None else replaced
        return packed

    @in_turn
    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the `state_dict` of each optimizer that this has taken the place of, as its own class loads it.

        A group that was added later is the last one's. Of one that has taken no place it is a list of one.
        """
        added = len(self.param_groups) - sum(self._group_counts)
        return divided(self.state_dict(), [*self._group_counts[:-1], self._group_counts[-1] + added])

    @in_turn
    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Load one `state_dict` for each wrapped optimizer, as `state_dicts` has them; raises as `load_state_dict`."""
        self.load_state_dict(joined(state_dicts))

    @in_turn
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict()` of this class (at any split) or of torch's class of the same algorithm.

        A parameter without a state starts anew. Without a `master_param` the master is made from the parameter. Raises
        ValueError that names the entry, before anything is changed, for an entry that cannot be loaded exactly.
        """
        self._check_usable()
        check_thread(self._stepped_by)
        check_document(state_dict)
        document: Any = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, document)
            document = document if replaced is None else replaced
        saved_groups, saved = check_document(document)
        check_groups(saved_groups, self.param_groups, self._algorithms)
        params = dict(_keyed(self.param_groups, saved_groups))
        for key in saved:
            if key not in params:
                raise ValueError(
                    f"state[{key!r}] belongs to no parameter of param_groups; expected one of {len(params)} keys; try "
                    "the checkpoint of this model"
                )
        # A frozen parameter has a key but no state here.
        states = {
            param: self.state.checked(f"state[{key!r}]", param, saved.get(key, {}))
            for key, param in params.items()
            if param in self._members
        }
        groups = [
            {**copy.deepcopy({**theirs, "params": []}), "params": ours["params"]}
            for theirs, ours in zip(saved_groups, self.param_groups, strict=True)
        ]
        for group, ours in zip(groups, self.param_groups, strict=True):
            if "param_names" in ours:
                group.setdefault("param_names", ours["param_names"])
        self._load(groups, states)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __setstate__(self, loaded: dict[str, Any]) -> None:
        """Take over the groups that `load_state_dict` has prepared; the state stays where it lives.

        List and groups stay the same objects: another optimizer may share them, see `take_place_of`.
        """
        listed = zip(self.param_groups, loaded["param_groups"], self._algorithms, strict=True)
        for ours, group, algorithm in listed:
            options = {**group_defaults(algorithm), **group, **algorithm.kernels}
            ours.clear()
            ours.update(options)


def _before_step(optimizer: SavedOptimizer, args: object, kwargs: Mapping[str, Any]) -> None:
    first, optimizer._stepped_by = optimizer._stepped_by is None, threading.current_thread()
    if first and kwargs.get("closure", args) is None and _makes_states_only(optimizer):
        optimizer.refresh_masters()


def _makes_states_only(optimizer: SavedOptimizer) -> bool:
    """Return whether a first step only shows states, as torch.distributed.checkpoint.state_dict takes one.

    It may have loaded the model before: its weights are to stay, so that no master of before may come back.
    """
    return all(float(group["lr"]) == 0 for group in optimizer.param_groups) and not optimizer.state


def _keyed(groups: Groups, saved_groups: Groups) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each key with its parameter."""
    for group, saved in zip(groups, saved_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)
