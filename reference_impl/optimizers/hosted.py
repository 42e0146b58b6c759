# SPDX-License-Identifier: Apache-2.0
"""The base of all optimizers with states on the host: each is this one, assembled from different parts.

It is the interface to torch: groups, saving and loading, attaching a model, closing. Its `Engine` takes the steps. A
`Placement` has the places of states and weights, `StepGradients` the gradients of a step, and `Shares` the states.

Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from reference_impl.distributed.mesh import norm_reduction
from reference_impl.memory.closing import ClosedAtExit, close_behind, undo_all, undo_as_one
from reference_impl.memory.shown import Shown
from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import Algorithm, MatrixAlgorithm
from reference_impl.optimizers.engine import Engine
from reference_impl.optimizers.formulas import GroupFormulas
from reference_impl.optimizers.gradients.of_step import StepGradients
from reference_impl.optimizers.gradients.scale import OfOneStep, take_scale
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.owners import check_untrained, note_owner, take_place
from reference_impl.optimizers.parameter_state import OptimizerState
from reference_impl.optimizers.placement import Placement
from reference_impl.optimizers.readers import StepSite
from reference_impl.optimizers.saved_checks import check_document
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.state_dict import checked, makes_states_only, passed_through, saved, take_over
from reference_impl.optimizers.state_offload_wrapped import Wrapped, check_group, divided, joined
from reference_impl.optimizers.step import Status, hooked, in_turn, without_gradients
from reference_impl.optimizers.trained import TrainedParameters

if TYPE_CHECKING:
    from reference_impl.optimizers.streamed.share import StreamedShare


class HostedOptimizer(Shown, ClosedAtExit, torch.optim.Optimizer):
    """A `torch.optim.Optimizer` with states on the host, whose `step()` may return before its weights are new.

    It can be used only in the process that made it. A subclass makes the parts, and calls `_start` with them.

    Args:
        params, defaults: as in `torch.optim.Optimizer`.
        algorithm: the states and hyper-parameters of groups without a formula of matrices.
        matrices: the default formula of groups, if it is one of matrices.
        max_grad_norm: clip the global norm exactly.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns the squared norm over all ranks.
        updates_in_backward: some gradients are used before all are known, so nothing can be clipped.
        overlaps_forward: the update runs on behind `step()`, and a model waits for its weights.
        shows_steps, masters_of_all, passes_over_unknown: see `OptimizerState`.
    """

    # Megatron's form says itself where it writes parameters, and trains parameters without a gradient and another's.
    _follows_writes, _trains_frozen, _trains_others = True, False, False

    # GradScaler hands over its scale and overflow flag instead of touching the gradients itself.
    _step_supports_amp_scaling = True
    grad_scale = OfOneStep()
    found_inf = OfOneStep()

    _states: OptimizerState | None = None
    # The number of groups of each optimizer that this one replaces.
    _group_counts: Sequence[int] = (0,)

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        algorithm: Algorithm,
        *,
        matrices: MatrixAlgorithm | None = None,
        max_grad_norm: float | None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        updates_in_backward: bool = False,
        overlaps_forward: bool = True,
        shows_steps: bool,
        masters_of_all: bool = False,
        passes_over_unknown: bool = False,
    ) -> None:
        checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=updates_in_backward)
        # Remaining calls of `close`, and calls that remove hooks from gradients.
        self._unclosed: list[Callable[[], None]] = []
        self._hooks: list[Callable[[], None]] = []
        self._formulas = GroupFormulas(algorithm, matrices)
        self._trained = TrainedParameters(also_frozen=self._trains_frozen)
        self._members = self._trained.members
        # Neither the engine nor the states keep their owner alive.
        owner = weakref.proxy(self)
        self._engine = Engine(
            owner,
            self._members,
            max_grad_norm=max_grad_norm,
            follows_writes=self._follows_writes,
            overlaps_forward=overlaps_forward,
        )
        self._failures = self._engine._failures
        super().__init__(params, defaults)
        note_owner(self, self._engine)
        self._states = OptimizerState(
            self._members,
            algorithm,
            lambda members: owner._engine.parts_of(members),
            self._failures,
            shows_steps=shows_steps,
            masters_of_all=masters_of_all,
            passes_over_unknown=passes_over_unknown,
            sets_weights=self._follows_writes,
        )
        self.register_step_pre_hook(_before_step)
        everything = [param for group in self.param_groups for param in group["params"]]
        self._device = checks.one_device(everything)
        self._reduce_norm_squared = norm_reduction(
            everything, reduce_norm_squared, clips=max_grad_norm is not None
        )

    def _start(
        self,
        shares: Shares,
        placement: Placement,
        gradients: StepGradients,
        *,
        wrapped: Wrapped | None = None,
        closers: list[Callable[[], None]] | None = None,
    ) -> None:
        """Work with these parts from now on, and make the states of all parameters; give all back on an error.

        It takes the place, the groups and the states of `wrapped` optimizers. `closers` gets `close`, before anybody
        else has the optimizer.
        """
        self._placement = placement
        self._engine.start(StepSite(self._device), shares, gradients, self._reduce_norm_squared)
        optimizers = () if wrapped is None else wrapped.optimizers
        given = [dict(each.state) for each in optimizers]
        try:
            if wrapped is not None:
                self.param_groups, self._formulas = wrapped.groups, wrapped.formulas
                self._group_counts = wrapped.group_counts
            self.state.waiting = {param: state for each in given for param, state in each.items()}
            self._admit()
            for each in optimizers:
                self.take_place_of(each, each.param_groups)
            if closers is not None:
                closers.append(self.close)
            for each in optimizers:
                each.state.clear()
        except BaseException as error:
            close_behind(error, self._give_back)
            for each, states in zip(optimizers, given, strict=True):
                each.state.update(states)
            raise

    def take_place_of(self, given: torch.optim.Optimizer, groups: list[dict[str, Any]] | None = None) -> None:
        """Let `given`, perhaps held by a scheduler, have `groups`, by default all; refuse calls that need states.

        Its step, save or load raises RuntimeError until this optimizer is closed. A rate set in either holds.
        """
        take_place(self, given, self._unclosed)
        given.param_groups = self.param_groups if groups is None else groups

    @property
    def members(self) -> Mapping[torch.Tensor, Member]:
        """The trained parameters, and for each how many of its elements stay, stream or are updated on the CPU."""
        return self._members

    @property
    def streamed(self) -> StreamedShare:
        """The share of streamed states, if there is one. Raises RuntimeError when the optimizer is closed."""
        return self._engine.open.streamed

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients lose their values in backward, so that nobody can read or change them before `step()`."""
        return self._engine.gradients.may_leave

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm (0-dim fp32) of the last step's gradients; None if none was taken."""
        return self._engine.grad_norm

    @property
    def status(self) -> Status:
        """The fate of the last gradients: `untouched`, `begun`, `broken` or `closed`.

        `begun`: a step or a backward has begun to use them, and the next call finishes a step cut short by an error.
        `untouched`: none has been used. `broken`: every call raises the first error again. It is about the last step
        until its gradients are dropped, new ones come or an attached model's forward begins.
        """
        return self._engine.tell_status()

    def _facts(self) -> Mapping[str, str]:
        facts = self._trained.facts(self.param_groups, has_shares=hasattr(self, "split"))
        return {**facts, "status": self._engine.status()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this and to the wrapped optimizer, if it is one; the fraction applies to it by itself."""
        if self._engine.is_closed:
            super().add_param_group(param_group)
            return
        self._add_group(param_group, self.defaults if self._formulas.names_default(param_group) else {})

    @in_turn
    def _add_group(self, param_group: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Add a group with missing options from `options`, and make its states; all or nothing."""
        is_open = not self._engine.is_closed
        if is_open:
            self._engine.ready()
        matrices, completed = self._formulas.complete(param_group, options)
        # torch completes a group with the hyper-parameters of other formulas, too.
        foreign, before = self.defaults.keys() - completed.keys(), len(self.param_groups)
        try:
            super().add_param_group(completed)
            for name in foreign:
                del completed[name]
            self._formulas.matrices.append(matrices)
            self._check_group(self.param_groups[-1])
            if is_open:
                self._admit_new()
        except BaseException:
            # A group whose states are made stays: they are those of its parameters.
            added = [param for group in self.param_groups[before:] for param in group["params"]]
            if not any(param in self._members for param in added):
                del self.param_groups[before:], self._formulas.matrices[before:]
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for the group that was added last."""
        check_group(self._formulas.last, group)

    @without_gradients
    def _admit(self) -> None:
        """Make the states of the trainable parameters that are new here, masters from their weights."""
        params = self._trained.new_in(self.param_groups)
        if not self._trains_others:
            check_untrained((param for param, _ in params), but_by=self._engine)
        self._engine.attached.check_has(param for param, _ in params)
        shares, matrices = self._engine.open, self._formulas.matrices
        members = self._placement.lay_out(params, before=self._members.values(), matrices=matrices)
        parts = self._placement.parts(members)
        self._placement.check_room(shares, members, parts)
        with self._engine.aliased.learning(members):
            shares.add(members, parts)
        # Hooks first, which do nothing for a parameter that is no member; they all are at once.
        self._admitted(members)
        self._trained.add(members)
        self._trained.note_idle(self.param_groups)
        self.state.take_waiting(members)

    def _admitted(self, members: Sequence[Member]) -> None:
        """Hear of members to come, complete with states; again if a signal came before they were members."""

    def _admit_new(self) -> None:
        """Make states of the trainable parameters that have none, and let the attached model wait for them."""
        self._admit()
        if (model := self._engine.attached.model) is not None:
            self.attach(model)

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients of the last backward.

        With a model attached, returns when the work is queued; its forward waits for each weight. After an error
        `status` says whether the step has begun. The next call finishes a begun step, and takes another one only with
        new gradients.
        """
        self._engine.finish_earlier(has_closure=closure is not None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @in_turn
    def _take_step(self) -> None:
        """Take a step, unless an error has told of one that has used these gradients."""
        self._engine.check()
        if not self._engine.has_reported_begun:
            self._step()

    def _step(self) -> None:
        """Take a step, with states of parameters that were frozen and have a gradient now, as `torch.optim` does.

        Raises RuntimeError for parameters put into the groups by other code.
        """
        unfrozen = self._trained.unfrozen()
        self._placement.check_unfrozen(unfrozen, self._engine.attached.model)
        if unfrozen:
            self._admit_new()
        self._trained.check_replaced(self.param_groups)
        # Before the rest is noted: this call waits for updates, and would carry a noted rest out.
        self._engine.follow_writes()
        self._engine.take_noted()

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, unused offloaded ones included, or set them to zero.

        A step that has begun is finished first, and the scale of GradScaler is forgotten. Raises RuntimeError where
        backward has begun to use gradients and no step() came since.
        """
        if not self._engine.is_closed:
            self._engine.drop_gradients(to_zero=not set_to_none)
        take_scale(self)
        super().zero_grad(set_to_none)

    @in_turn
    def attach(self, model: nn.Module) -> None:
        """Let `step()` return early: the model's modules wait for their own weights in forward.

        Under FSDP2 gathers wait for their own shards; call it after `fully_shard`. State_dicts wait too, and loading
        one refreshes masters. Raises ValueError under FSDP1 and for parameters that the model does not have.
        """
        self._engine.attach(model, refresh_masters=self._refresh, check_load=self._check_load)

    @in_turn
    def detach(self) -> None:
        """Finish the weights and take `attach` back: from here on `step()` returns finished. Idempotent."""
        if not self._engine.attached:
            return
        try:
            if not self._engine.is_closed:
                self.synchronize()
        finally:
            self._engine.attached.detach()

    def synchronize(self) -> None:
        """Make the live current stream see finished weights: call it before reading them in your own code."""
        self._engine.synchronize()

    @in_turn
    def refresh_masters(self) -> None:
        """Make masters from the parameters as they are, after something else has written these.

        The next step does it, too, element by element; this drops the low bits of masters as well.
        """
        self.synchronize()
        self._refresh(list(self._members.values()))
        for member in self._members.values():
            member.note_weight()

    def refresh_written(self, params: Iterable[torch.Tensor]) -> None:
        """Make new masters, in place, of weights written by the user."""
        self._engine.remake_masters([self._members[param] for param in params])

    def _check_load(self, inside: Sequence[Member], remade: Sequence[Member]) -> None:
        """Raise RuntimeError where a load may not come now, see `CheckLoad`."""
        self._engine.check_unused(inside)

    def _refresh(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from their parameters."""
        # A weight with a home changes where it is lent, and `refresh_written` is told.
        self._engine.remake_masters([member for member in members if member.home is None])

    @in_turn
    def written_uncounted(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return the `members` with masters on the CPU and weights written past every counter.

        Other masters show it themselves. The weights are about to leave the device, for which this waits.
        """
        return self._engine.written_uncounted(members)

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
        `master_param` too. Offloaded state comes as CPU tensors. Torch's class resumes from the groups: bitwise for
        fp32 parameters; others it trains without the master, with moments in their dtype.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.finish_for_saving()
        document = saved(self.param_groups, self._formulas, self.state)
        return passed_through(self._optimizer_state_dict_post_hooks, self, document)

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
        ValueError with the name of an entry that cannot be loaded exactly, before anything is changed.
        """
        self._engine.check()
        checks.check_thread(self._engine.stepped_by)
        check_document(state_dict)
        document = passed_through(self._optimizer_load_state_dict_pre_hooks, self, dict(state_dict))
        groups, states, waiting = checked(document, self.param_groups, self._formulas, self.state)
        self._engine.finish_for_loading()
        engine = self._engine
        write = partial(self.state.write, finished=lambda members: engine.open)
        engine.writes.replace(
            [
                partial(self.__setstate__, {"param_groups": groups}),
                partial(setattr, self.state, "waiting", waiting),
                *(partial(write, *each) for each in states.items()),
            ]
        )
        self._placement.has_loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the groups that `load_state_dict` has prepared; the state stays where it lives."""
        take_over(self.param_groups, state["param_groups"], self._formulas)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: pinned memory and threads cannot be copied."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because its memory is pinned; try state_dict() and "
            "load_state_dict()"
        )

    @in_turn
    def close(self) -> None:
        """Finish, take all hooks off and give the host memory back, also where finishing raises.

        Again, it goes on with memory that could not be given back, and then does nothing. Once all is given back, it
        raises the error that has kept a step from being finished; a broken optimizer closes quietly. An interrupt or a
        RecursionError leaves it open or closed; behind the latter another call, with more room, finishes the step.
        """
        if not self._engine.is_closed:
            checks.check_alive(closed=False, made_by=self._engine.made_by)
        # Again, because memory of a failed call is free by then. An interrupt gives none back: the step stays.
        for is_last in () if self._engine.is_closed else (False, True):
            try:
                self._engine.finish_for_close()
                break
            except RecursionError:
                raise
            except Exception as error:
                if is_last or self._failures.first is not None:
                    close_behind(error, self._give_back)
                    raise
        self._give_back()

    def _give_back(self) -> None:
        undo_as_one([self._free, self._let_go, self._engine.used.forget, self._engine.attached.detach])

    def _free(self) -> None:
        # Of a broken optimizer everybody knows the error.
        with suppress(Exception) if self._failures.first else nullcontext():
            undo_all(self._unclosed)

    def _let_go(self) -> None:
        """Take own hooks off, be closed, and leave in `_unclosed` calls that free memory; changes nothing again."""
        undo_all(self._hooks)
        self._engine.close(self._unclosed)

    def __enter__(self) -> Self:
        """Return the optimizer itself."""
        return self


def _before_step(optimizer: HostedOptimizer, args: object, kwargs: Mapping[str, Any]) -> None:
    engine = optimizer._engine
    first, engine.stepped_by = engine.stepped_by is None, threading.current_thread()
    if (
        first
        and kwargs.get("closure", args) is None
        and makes_states_only(optimizer.param_groups, optimizer.state)
    ):
        optimizer.refresh_masters()
