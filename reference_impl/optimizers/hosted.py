"""The common part of optimizers with state on the host: attaching to a model, use in one process, closing.

It knows no share and no update. Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from reference_impl.device import Device
from reference_impl.distributed.fsdp2 import missing_name
from reference_impl.memory.closing import close_behind, register_undoably, undo_all
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.memory.shown import Shown
from reference_impl.optimizers import checks
from reference_impl.optimizers.forward_waits import ForwardWaits, forgetful
from reference_impl.optimizers.gradients.used import UsedGradients
from reference_impl.optimizers.layout import Member, check_kept
from reference_impl.optimizers.module_load import written, written_on_its_way
from reference_impl.optimizers.step import Failures, Status, in_turn

# All that have not been collected, so that two do not train one parameter.
_open: weakref.WeakSet[HostedOptimizer] = weakref.WeakSet()


class _OfOneStep:
    """An attribute that GradScaler sets before `step()` and deletes after it; deleting it twice is no error."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: HostedOptimizer | None, owner: type) -> Any:
        try:
            return vars(optimizer)[self._name]
        except (KeyError, TypeError):
            raise AttributeError(f"{owner.__name__} has no {self._name}: no GradScaler has set it") from None

    def __set__(self, optimizer: HostedOptimizer, value: Any) -> None:
        vars(optimizer)[self._name] = value

    def __delete__(self, optimizer: HostedOptimizer) -> None:
        vars(optimizer).pop(self._name, None)


class HostedOptimizer(Shown, torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` whose `step()` may return before its weights are new.

    It can be used only in the process that made it; `params` and `defaults` are as in `torch.optim.Optimizer`.
    """

    _device: Device
    _failures: Failures
    # Whether masters follow weights that somebody else has written.
    _follows_writes = True
    # Whether the update runs on behind `step()`, where a model waits for its weights.
    _overlaps_forward = True

    # GradScaler hands over its scale and overflow flag instead of touching the gradients itself.
    _step_supports_amp_scaling = True
    grad_scale = _OfOneStep()
    found_inf = _OfOneStep()

    # Calls that `close` has still to make, and calls that take hooks off gradients.
    _unclosed: list[Callable[[], None]]
    _hooks: list[Callable[[], None]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Return an optimizer that has taken nothing, as a constructor that fails leaves it."""
        made = super().__new__(cls)
        made._unclosed, made._hooks = [], []
        return made

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._members: dict[torch.Tensor, Member] = {}
        self._checked: list[list[torch.Tensor]] = []
        # Parameters of the groups that have no states here, because they were frozen.
        self._idle: list[torch.Tensor] = []
        self._waits: ForwardWaits | None = None
        self._gathers_can_wait = True
        self._pid = os.getpid()
        self._used = UsedGradients()
        # Where the last step was taken: the thread, before the first one that of this, and its stream.
        self._step_thread = threading.get_ident()
        self._step_stream: Any = None
        super().__init__(params, defaults)
        _open.add(self)

    @property
    @abstractmethod
    def _closed(self) -> bool:
        """Whether the host memory has been given back."""

    @abstractmethod
    def _status(self) -> Status:
        """See `status`."""

    def _facts(self) -> Mapping[str, str]:
        params = [param for group in self.param_groups for param in group["params"]]
        here, streamed, on_cpu = (
            sum(getattr(member, share) for member in self._members.values())
            for share in ("resident", "streamed", "on_cpu")
        )
        if not hasattr(self, "split"):
            # Without shares all that leaves streams.
            streamed, on_cpu = streamed + on_cpu, 0
        states = here + streamed + on_cpu or 1
        return {
            "parameters": f"{sum(param.numel() for param in params):,}",
            "states on the device": f"{here / states:.0%}",
            "streamed from the host": f"{streamed / states:.0%}",
            "updated on the CPU": f"{on_cpu / states:.0%}",
            "lr": ", ".join(dict.fromkeys(f"{group['lr']:g}" for group in self.param_groups)),
            "status": self._status(),
        }

    @property
    def status(self) -> Status:
        """The fate of the last gradients: `untouched`, `begun`, `broken` or `closed`.

        `begun`: a step or a backward has begun to use them, and the next call finishes one that an error has cut short.
        `untouched`: none has been used. `broken`: every call raises the first error again. It is about the last step
        until its gradients are dropped, new ones come or, where a model is attached, its forward begins.
        """
        with self._failures.turn:
            status = self._status()
            # Whoever hears so may call step() to go on.
            self._failures.told_begun |= status == "begun"
            return status

    def _step_begins(self, standing: Mapping[Member, torch.Tensor], *, left_unseen: bool) -> None:
        """Note which gradients a step begins to use, and on which stream; all or nothing."""
        stream = self._device.current_stream()
        self._used.note(standing, left_unseen=left_unseen)
        self._failures.told_begun = False
        self._step_stream = stream

    def _step_has_raised(self, closure: Callable[[], Any] | None = None, *, has_rest: bool = False) -> None:
        """Hear that `step(closure)` raises: finish one that `has_rest`; wait for weights where no forward would."""
        if has_rest or not self._returns_early:
            with suppress(Exception):
                self.synchronize()

    def _step_is_last(self, *, is_unqueued: bool) -> bool:
        """Return whether a program has not gone on from the last step yet: an error is about that step."""
        if self._waits is not None and self._waits.has_run_since_step:
            return False
        return is_unqueued or self._used.are_all(self._members.values())

    def _seen_by_steps(self, wait: Callable[[], None]) -> None:
        """Run `wait`, which makes the live current stream wait for weights, and nobody after it.

        Another thread that reads on a stream of its own waits behind the stream of the steps, which waits first.
        """
        stream = self._step_stream
        if stream is None or not self._is_reader or self._device.current_stream() == stream:
            wait()
            return
        with self._device.on(stream):
            wait()
            weights_are_new = self._device.record()
        self._device.wait(weights_are_new)

    @property
    def _is_reader(self) -> bool:
        """Whether the calling thread is neither the one that steps nor one of autograd's in a backward."""
        elsewhere = self._step_thread != threading.get_ident()
        return elsewhere and torch._C._current_graph_task_id() == -1

    @abstractmethod
    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream see the new weights of `members`."""

    @abstractmethod
    def _refresh(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from their parameters."""

    @abstractmethod
    def _follow(self, member: Member) -> None:
        """Set the master of `member` to the weight, but for elements of which the weight is the master rounded."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the live current stream see finished weights."""

    @abstractmethod
    def _finish_for_close(self) -> None:
        """Finish the step that runs; of a broken optimizer nothing, and nothing is raised."""

    @abstractmethod
    def _let_go(self) -> None:
        """Take own hooks off, be closed, and leave in `_unclosed` calls that free memory; changes nothing again."""

    @in_turn
    def close(self) -> None:
        """Finish, take all hooks off and give the host memory back, also where finishing raises.

        Again, it goes on with what could not be given back, and then does nothing. Raises, once all is given back, what
        has kept a step from being finished; a broken optimizer closes quietly. An interrupt leaves it open or closed.
        A RecursionError does so too: where there is more room, another call finishes the step.
        """
        if not self._closed:
            checks.check_alive(closed=False, made_by=self._pid)
        try:
            if not self._closed:
                self._finish_for_close()
        except RecursionError:
            raise
        except Exception as error:
            close_behind(error, self._give_back)
            raise
        # Not behind an interrupt: a step cannot be finished once its memory is given back.
        self._give_back()

    def _give_back(self) -> None:
        with deferred_interrupts():
            if self._waits is not None:
                self._waits.close()
            self._used.forget()
            self._let_go()
            # Of a broken optimizer everybody knows the error.
            with suppress(Exception) if self._failures.first else nullcontext():
                undo_all(self._unclosed)

    def _abandon(self, error: BaseException) -> None:
        """Give back all that the constructor has taken, which has failed with `error`."""
        with deferred_interrupts():
            self._let_go()
            close_behind(error, partial(undo_all, self._unclosed))

    def _hook_gradients(self, params: Iterable[torch.Tensor], hear: Callable[[torch.Tensor], None]) -> None:
        """Call `hear`, a method of this, with each of `params` whose gradient is final."""
        hook = forgetful(hear)
        for param in params:
            register_undoably(param.register_post_accumulate_grad_hook, hook, self._hooks)

    @property
    def members(self) -> Mapping[torch.Tensor, Member]:
        """The trained parameters, and for each how many of its elements stay, stream or are updated on the CPU."""
        return self._members

    def take_place_of(self, given: torch.optim.Optimizer, groups: list[dict[str, Any]] | None = None) -> None:
        """Let `given`, which a scheduler may hold, have `groups`, by default all; refuse calls that need states.

        To step, save or load it raises RuntimeError until this is closed. A rate that is set in either holds.
        """
        here, stepped, name = weakref.ref(self), weakref.ref(given), type(given).__name__

        def refuse(*_: Any) -> None:
            taker = here()
            if taker is not None and not taker._closed:
                raise checks.has_no_states(name, type(taker).__name__)

        def note_step(*_: Any) -> None:
            # Schedulers ask the one that they were made for whether it has been stepped.
            if (optimizer := stepped()) is not None:
                vars(optimizer)["_opt_called"] = True

        for register in (
            given.register_step_pre_hook,
            given.register_state_dict_pre_hook,
            given.register_load_state_dict_pre_hook,
        ):
            register_undoably(register, refuse, self._unclosed)
        self.register_step_post_hook(note_step)
        given.param_groups = self.param_groups if groups is None else groups

    @in_turn
    def attach(self, model: nn.Module) -> None:
        """Let `step()` return early: the model's modules wait for their own weights in forward.

        Under FSDP2 gathers wait for their own shards; call it after `fully_shard`. State_dicts wait too, and loading
        one refreshes masters. Raises ValueError under FSDP1 and for parameters that the model does not have.
        """
        checks.check_model(model, serves_data_parallel=True)
        matrices = {param: m.matrices for param, m in self._members.items() if m.matrices is not None}
        checks.check_no_embeddings(model, matrices)
        missing = missing_name(model)
        if missing is not None:
            checks.warn_gathers_cannot_wait(missing)
        before = self._waits
        # Nothing would take the hooks off that an interrupt keeps this from knowing.
        with deferred_interrupts():
            self._waits = ForwardWaits(
                model,
                self._members,
                device=self._device,
                wait_for=self._wait_for,
                refresh_masters=self._refresh,
                noting_status=self._failures.noting_status_on_error,
                gates=missing is None,
            )
            self._gathers_can_wait = missing is None
            if before is not None:
                before.close()

    @property
    def _model_waits(self) -> bool:
        """Whether a model is attached that waits for its weights, so that `step()` need not."""
        return self._waits is not None and self._gathers_can_wait

    @property
    def _returns_early(self) -> bool:
        return self._model_waits and self._overlaps_forward

    def _order_gathers(self, *, all_are_new: bool) -> None:
        """Let FSDP2's gathers run behind all that the live current stream has waited for, see `ForwardWaits`."""
        if self._waits is not None:
            self._waits.order_gathers(all_are_new=all_are_new)

    @in_turn
    def detach(self) -> None:
        """Finish the weights and take `attach` back: from here on `step()` returns finished. Idempotent."""
        if self._waits is None:
            return
        try:
            if not self._closed:
                self.synchronize()
        finally:
            self._waits.close()
            self._waits = None

    def _note_idle(self) -> None:
        """Note which parameters of the groups have no states here."""
        listed = (param for group in self.param_groups for param in group["params"])
        self._idle = [param for param in listed if param not in self._members]

    @abstractmethod
    def _admit_new(self) -> None:
        """Make states of the trainable parameters that have none."""

    def _follow_groups(self) -> None:
        """Make states of parameters that were frozen and have a gradient now, as `torch.optim` does.

        Raises RuntimeError for parameters that somebody has put into the groups.
        """
        if any(param.grad is not None for param in self._idle):
            self._admit_new()
        self._check_replaced()

    def _check_replaced(self) -> None:
        """Raise RuntimeError when others stand in a group than the parameters that this has states for.

        Whoever shards a model after its optimizer was made gives groups other lists. A step would change no weight.
        """
        lists = [group["params"] for group in self.param_groups]
        if len(lists) == len(self._checked) and all(map(operator.is_, lists, self._checked)):
            return
        for param in (param for listed in lists for param in listed):
            if param.grad is not None and param not in self._members:
                raise checks.replaced(param)
        self._checked = lists

    @in_turn
    def refresh_masters(self) -> None:
        """Make masters from the parameters as they are, after something else has written these.

        The next step does it, too, element by element; this drops the low bits of masters as well.
        """
        self.synchronize()
        self._refresh(list(self._members.values()))
        for member in self._members.values():
            member.note_weight()

    def _follow_writes(self) -> None:
        """Let masters follow the weights that somebody else has written. Raises RuntimeError for one on its way."""
        if not self._follows_writes:
            return
        found = written(self._members.values())
        self._refuse_written(found)
        for member in found:
            check_kept(member)
            self._follow(member)

    @abstractmethod
    def _is_on_its_way(self, member: Member) -> bool:
        """Return whether the new weight of `member`, for which nobody has waited, has still to be written."""

    def _refuse_written(self, members: Iterable[Member]) -> None:
        """Raise RuntimeError, from now on, where somebody has written a weight whose new value is on its way."""
        if not self._follows_writes:
            return
        for member in written(member for member in members if member.pending):
            if self._is_on_its_way(member):
                self._failures.first = written_on_its_way(member)
                raise self._failures.first

    def _attach_again(self) -> None:
        """Let modules wait for members that are new since `attach`."""
        if self._waits is not None and self._waits.model is not None:
            self.attach(self._waits.model)

    def _check_new(self, params: Iterable[torch.Tensor]) -> None:
        """Raise ValueError for parameters that another open optimizer trains, or that an attached model has not."""
        listed = list(params)
        self._check_unshared(listed)
        if self._waits is not None and self._waits.model is not None:
            checks.check_in_model(self._waits.model, listed)

    def _check_unshared(self, params: Iterable[torch.Tensor]) -> None:
        """Raise ValueError for parameters that another open optimizer trains."""
        check_untrained(params, but_by=self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and the scale and overflow flag of GradScaler."""
        self._take_scale()
        super().zero_grad(set_to_none)

    def _take_scale(self) -> dict[str, Any]:
        """Return the scale and the overflow flag of this step, and forget those that GradScaler has set.

        It would multiply its next scale by the old one, where an error or a signal kept it from deleting that.
        """
        said = {
            "loss_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }
        if said["found_inf"] is not None:
            del self.found_inf, self.grad_scale
        return said

    @contextmanager
    def _scaled_once(self) -> Iterator[None]:
        """Forget the scale and flag that GradScaler has set for a step that raises."""
        try:
            yield
        except BaseException:
            self._take_scale()
            raise

    def _check_usable(self) -> None:
        checks.check_alive(closed=self._closed, made_by=self._pid)

    def __enter__(self) -> Self:
        """Return the optimizer itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; an error of closing never hides the `error` that has ended the block."""
        try:
            self.close()
        except BaseException as later:
            if error is None:
                raise
            error.add_note(f"closing the optimizer raised, too: {later!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: pinned memory and threads cannot be copied."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because its memory is pinned; try state_dict() and "
            "load_state_dict()"
        )


def check_untrained(params: Iterable[torch.Tensor], *, but_by: HostedOptimizer | None = None) -> None:
    """Raise ValueError for parameters that an open optimizer trains, `but_by` this one."""
    checks.check_unshared(
        list(params),
        lambda param: any(
            param in each._members for each in _open if each is not but_by and not each._closed
        ),
    )


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Have masters follow another optimizer's writes to weights: fused ones write past autograd's counter."""
    if isinstance(optimizer, HostedOptimizer) or not _open:
        return
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for each in list(_open):
        for member in (each._members[param] for param in stepped if param in each._members):
            member.version = -1


register_optimizer_step_post_hook(_note_step)
