"""What optimizers with state on the host have in common: forward waits on a model, one process, an end.

It knows no share and no update; `hybrid` and `state_offload` do. Explained in docs/optimizer-offloading.md and
docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import operator
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reference_impl.optimizers import checks
from reference_impl.optimizers.layout import Member

_T = TypeVar("_T")

# All that have not been collected, so that two do not train one parameter.
_open: weakref.WeakSet[HostedOptimizer] = weakref.WeakSet()


class HostedOptimizer(torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` whose `step()` may return before its weights are new.

    It can be used only in the process that made it; `params` and `defaults` are as in `torch.optim.Optimizer`.
    """

    # GradScaler hands over its scale and overflow flag instead of touching the gradients itself.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._members: dict[torch.Tensor, Member] = {}
        self._checked: list[list[torch.Tensor]] = []
        self._waits: ForwardWaits | None = None
        self._pid = os.getpid()
        super().__init__(params, defaults)
        _open.add(self)

    @property
    @abstractmethod
    def _closed(self) -> bool:
        """Whether the host memory has been given back."""

    @property
    @abstractmethod
    def _moves_in_backward(self) -> bool:
        """Whether gradients are sent off before backward is over."""

    @abstractmethod
    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream see the new weights of `members`."""

    @abstractmethod
    def _refresh(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from their parameters."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the live current stream see finished weights."""

    @abstractmethod
    def close(self) -> None:
        """Finish, take all hooks off and give the host memory back."""

    @property
    def members(self) -> Mapping[torch.Tensor, Member]:
        """The trained parameters, and for each how many of its elements stay, stream or are updated on the CPU."""
        return self._members

    def attach(self, model: nn.Module) -> None:
        """Let `step()` return early: the model's modules wait for their own weights in forward.

        Their state_dicts wait too, and loading one refreshes masters. Raises ValueError under FSDP, and when
        gradients would be sent off before DistributedDataParallel has reduced them.
        """
        checks.check_model(model, moves_in_backward=self._moves_in_backward)
        if self._waits is not None:
            self._waits.close()
        self._waits = ForwardWaits(
            model, self._members, wait_for=self._wait_for, refresh_masters=self._refresh
        )

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

    def refresh_masters(self) -> None:
        """Make masters from the parameters as they are, after something else has written these."""
        self.synchronize()
        self._refresh(list(self._members.values()))

    def _attach_again(self) -> None:
        """Let modules wait for members that are new since `attach`."""
        if self._waits is not None and self._waits.model is not None:
            self.attach(self._waits.model)

    def _check_unshared(self, params: Iterable[torch.Tensor]) -> None:
        """Raise ValueError for parameters that another open optimizer trains."""
        checks.check_unshared(
            list(params),
            lambda param: any(
                param in each._members for each in _open if each is not self and not each._closed
            ),
        )

    @contextmanager
    def _scaled_once(self) -> Iterator[None]:
        """Forget what GradScaler has set for a step that raises: it would multiply its next scale by the old one."""
        try:
            yield
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise

    def _check_usable(self) -> None:
        checks.check_alive(closed=self._closed, made_by=self._pid)

    def __enter__(self) -> Self:
        """Return the optimizer itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; what this raises never hides the `error` that has ended the block."""
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


class ForwardWaits:
    """Hooks on a model: each module's forward waits for the weights that this module owns.

    Saving and loading its state_dict wait too, and loading calls `refresh_masters`. Each forward also teaches the
    members their `order`. A weight that somebody reads without its module's forward, as fused losses read a head's, is
    updated first of all, and the first module of the next forward waits for it. The owner of both methods is not kept
    alive, and neither is the model.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Mapping[torch.Tensor, Member],
        *,
        wait_for: Callable[[Sequence[Member]], None],
        refresh_masters: Callable[[Sequence[Member]], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._clock = self._forward_start = max((member.order for member in members.values()), default=0)
        self._handles: list[RemovableHandle] = []
        self._ran: set[Member] = set()
        self._unannounced: list[Member] = []
        wait, refresh = forgetful(wait_for), forgetful(refresh_masters)
        everyone = list(members.values())

        def finish() -> None:
            wait([member for member in everyone if member.pending])

        for module in model.modules():
            own = _owned(module, members)
            if own:
                self._handles += [
                    # First of all hooks: others, such as weight normalisation, read weights too.
                    module.register_forward_pre_hook(
                        ModelHook(self._forward_hook(own, wait), own=own, finish=finish),
                        prepend=True,
                    ),
                    module.register_state_dict_pre_hook(_before_or_after(wait, own)),
                    module.register_load_state_dict_pre_hook(_before_or_after(wait, own)),
                    module.register_load_state_dict_post_hook(_before_or_after(refresh, own)),
                ]
        start = ModelHook(self._start_forward, own=_owned(model, members), finish=finish)
        self._handles.append(model.register_forward_pre_hook(start, prepend=True))

    @property
    def model(self) -> nn.Module | None:
        """The model, unless it is gone."""
        return self._model()

    def _start_forward(self, module: nn.Module, args: Any) -> None:
        self._forward_start = self._clock

    def _forward_hook(
        self, own: list[Member], wait: Callable[[Sequence[Member]], None]
    ) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            # A member's first use in the last forward is the best guess of when the next one needs it.
            self._clock += 1
            for member in own:
                if member.order <= self._forward_start:
                    member.order = self._clock
            self._ran.update(own)
            waiting = [member for member in (*own, *self._unannounced) if member.pending]
            if waiting:
                wait(waiting)

        return hook

    def learn(self, members: Iterable[Member]) -> None:
        """Note those of `members`, which have new gradients, whose modules no forward since the last step has run."""
        if self._ran:
            for member in members:
                if member not in self._ran and member not in self._unannounced:
                    self._unannounced.append(member)
                    member.order = -1
        self._ran.clear()

    def close(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()


class ModelHook:
    """A hook on a module that stays behind: a copy or a pickle of the module has one that does nothing instead.

    So a copied model is independent of the optimizer, and loads where this package is not installed. Copying waits for
    new weights by `finish`; the module's `own` members have been copied by then, so a deep copy takes these again.
    """

    __slots__ = ("_finish", "_own", "_run")

    def __init__(
        self,
        run: Callable[..., None],
        *,
        own: Sequence[Member] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._run = run
        self._own = own
        self._finish = finish

    def __call__(self, *arguments: Any) -> None:
        """Run the hook."""
        self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that takes anything and does nothing."""
        late = [member.param for member in self._own if member.pending and id(member.param) in memo]
        if self._finish is not None:
            self._finish()
        with torch.no_grad():
            for param in late:
                memo[id(param)].copy_(param)
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the standard library's function that takes anything and does nothing.

        Raises RuntimeError when new weights were on their way to parameters that are in the pickle by now.
        """
        if any(member.pending for member in self._own):
            raise RuntimeError(
                "a model was pickled while new weights were on their way; expected finished ones; try "
                "optimizer.synchronize() before"
            )
        if self._finish is not None:
            self._finish()
        return getattr, (nullcontext(), "__exit__")


def forgetful(method: Callable[[_T], None]) -> Callable[[_T], None]:
    """Return a function that calls a bound `method` without keeping its owner alive, and nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(argument: _T) -> None:
        bound = reference()
        if bound is not None:
            bound(argument)

    return call


def _owned(module: nn.Module, members: Mapping[torch.Tensor, Member]) -> list[Member]:
    """Return the members that `module` owns itself, without its children's."""
    return [members[p] for p in module._parameters.values() if p is not None and p in members]


def _before_or_after(
    method: Callable[[Sequence[Member]], None], own: Sequence[Member]
) -> Callable[..., None]:
    """Return a hook around a state_dict, whose own arguments do not matter."""
    return ModelHook(lambda *_: method(own))
