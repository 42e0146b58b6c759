"""AdamW whose state lives partly on the host, at nearly the speed of the GPU.

`HybridDeviceOptimizer` is a real `torch.optim.Optimizer`. A share of the state (fp32 masters and moments) is kept and
updated on the CPU. Another share may be kept on the host and stream through the GPU. The rest stays on the GPU.
Gradients of the CPU share are offloaded during backward, and all shares are updated in the order of the next forward,
behind its compute.

It shards nothing, and offloads no activations or weights. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from reference_impl.device import Event
from reference_impl.distributed.mesh import norm_reduction
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import Algorithm, MatrixAlgorithm, group_defaults
from reference_impl.optimizers.backward_hooks import BackwardHooks
from reference_impl.optimizers.clip_decision import ClipDecision, decide
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.formulas import formulas_in
from reference_impl.optimizers.gradients import (
    AskedGradients,
    Gradients,
    factors_of,
    put_in_place,
    standing_on,
)
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.module_load import count_own
from reference_impl.optimizers.options import Budgets, CpuUpdate, Options, Streaming, take_moved_keywords
from reference_impl.optimizers.shares import PreparedStep, Shares
from reference_impl.optimizers.stand_in import GradientStandIn
from reference_impl.optimizers.state_dict import SavedOptimizer
from reference_impl.optimizers.step import (
    Failures,
    Status,
    StepPlan,
    as_one,
    hooked,
    in_turn,
    snapshot,
    without_gradients,
)


class HybridDeviceOptimizer(SavedOptimizer):
    """AdamW over fp32 masters, `offload_fraction` of whose state lives on the CPU.

    >>> optimizer = HybridDeviceOptimizer(model.parameters(), offload_fraction=0.5, lr=3e-4, max_grad_norm=1.0)
    >>> optimizer.attach(model)
    >>> for batch in batches:
    ...     model(batch).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Args:
        params: parameters or groups, in the order in which the forward uses them; bf16, fp16 or fp32.
        offload_fraction: share of the state's bytes that the CPU holds and updates, exact to 64 elements.
        offload_filter: instead of the fraction, which parameters are offloaded whole.
        split: instead of both, the shares (resident, streamed, CPU), which sum to 1, or `auto` for the fastest.
        budgets: memory that `auto` may use for states, and this machine's rates.
        streaming: how the streamed share's states cross the link.
        cpu: threads, buckets and pinning of the CPU share, and whether its update overlaps with the next forward.
        algorithm: the formula; `Adam()` is AdamW. Its hyper-parameters (`lr`, `betas`, ...) follow as keywords. Groups
            with `use_muon=True` or an `algorithm` of their own are updated in whole matrices, never on the CPU.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns that over all ranks. Not needed for
            DTensors of one mesh, whose norm is summed over it.
        backward_overlap: the work during backward. `gradients` (default): gradients go to the host and their GPU
            memory is freed; a `GradientStandIn` stays on `param.grad`. `update`: the CPU update starts too, with the
            hyper-parameters of that moment, and nothing can be skipped or clipped. `nothing`: gradients stay on
            `param.grad` until `step()`, which code that reads them needs.
            Gradients of DTensors leave only where this is given.

    Bitwise contract: the CPU share equals `torch.optim.AdamW(fused=True)` on the CPU over the fp32 master, the
    resident and the streamed share equal it on the device, and the parameter is its master rounded to nearest even.

    Raises TypeError or ValueError for options and parameters it cannot serve, and HostMemoryError when the host
    lacks the memory: all before anything is built. Option keywords of earlier releases warn with their new spelling.
    """

    # Megatron's form trains parameters without a gradient, shows masters of fp32, keeps a parameter in one bucket, and
    # passes over states that it does not know.
    _trains_frozen = _masters_of_all = _whole_members = _passes_over_unknown = False

    def __init__(
        self,
        params: Any,
        *,
        offload_fraction: float = 1.0,
        offload_filter: Callable[[torch.Tensor], bool] | None = None,
        split: tuple[float, float, float] | Literal["auto"] | None = None,
        budgets: Budgets | None = None,
        streaming: Streaming | None = None,
        cpu: CpuUpdate | None = None,
        algorithm: Algorithm | MatrixAlgorithm | None = None,
        max_grad_norm: float | None = None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        backward_overlap: checks.BackwardOverlap | None = None,
        **hyper_parameters: Any,
    ) -> None:
        given = Options(
            budgets=budgets or Budgets(), streaming=streaming or Streaming(), cpu=cpu or CpuUpdate()
        )
        options = take_moved_keywords(given, hyper_parameters)
        params, algorithms, self._default_matrices = formulas_in(params, algorithm)
        checks.check_options(algorithms, hyper_parameters, offload_fraction, backward_overlap)
        checks.check_split(
            split, offload_fraction, algorithms, filtered=bool(offload_filter), budgets=options.budgets
        )
        checks.check_cpu(options.cpu)
        self._filter, self._hyper_parameters = offload_filter, hyper_parameters
        self._max_grad_norm = max_grad_norm
        self._backward_overlap = backward_overlap or "gradients"
        self._overlaps_forward = options.cpu.overlap_forward
        self._accumulating = False
        self._asks_whether_accumulating: Callable[[], bool] = lambda: False
        # The update that backward has begun, and the gradients of a step() that was called to go on with it.
        self._in_backward: CpuStep | None = None
        self._asked: AskedGradients | None = None
        self._refused_in_between = False
        self._failures = Failures(self._status)
        self._shares: Shares | None = None
        self.grad_norm: torch.Tensor | None = None
        super().__init__(
            params,
            {**group_defaults(algorithms[0]), **hyper_parameters},
            algorithms[0],
            shows_steps=True,
            masters_of_all=self._masters_of_all,
            passes_over_unknown=self._passes_over_unknown,
        )
        everything = [param for group in self.param_groups for param in group["params"]]
        checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=backward_overlap == "update")
        self._reduce_norm_squared = norm_reduction(
            everything, reduce_norm_squared, clips=max_grad_norm is not None
        )
        self._device = checks.one_device(everything)
        self._shares = Shares(
            self._device,
            self._algorithm,
            everything,
            split=split or (1 - offload_fraction, 0.0, offload_fraction),
            options=options,
            whole_members=self._whole_members,
            matrices=self._matrices_by_param,
            follows_writes=self._follows_writes,
        )
        self.split = self._shares.split
        self._gradients = Gradients(
            self._shares,
            leave_in_backward=self._moves_in_backward,
            sharded_too=backward_overlap is not None,
            measures=backward_overlap != "update",
        )
        self._backward = BackwardHooks(self._device, self._members, self._gradients, self._on_gradient)
        try:
            self._admit_new()
        except BaseException as error:
            self._abandon(error)
            raise

    @in_turn
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the fraction applies to it by itself."""
        self._add_with_formula(param_group, self._hyper_parameters)
        try:
            self._check_group(self.param_groups[-1])
            if self._shares is not None:
                self.synchronize()
                self._admit_new()
        except BaseException:
            self._take_back_group()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        checks.check_group(self._algorithms[-1], group)

    @without_gradients
    def _admit_new(self) -> None:
        """Lay out the trainable parameters that are new here, and hook those that are offloaded."""
        listed = [(param, i) for i, group in enumerate(self.param_groups) for param in group["params"]]
        checks.one_device(param for param, _ in listed)
        new = [each for each in listed if each[0] not in self._members]
        params = [each for each in new if each[0].requires_grad or self._trains_frozen]
        self._check_new(param for param, _ in params)
        members = self._open.lay_out(params, len(self._members), self._filter, self._matrices)
        self._open.add(members)
        with deferred_interrupts():
            self._members.update((member.param, member) for member in members)
            self._backward.hear(members, where_they_leave=not self._open.prefetches)
        self._note_idle()
        self._attach_again()

    def attach(self, model: torch.nn.Module) -> None:
        """Let `step()` return early, see `HostedOptimizer.attach`; under DistributedDataParallel a collective."""
        self._backward.check(model, self.split)
        super().attach(model)
        self._backward.attach(model)

    @property
    def _open(self) -> Shares:
        assert self._shares is not None
        return self._shares

    @in_turn
    def _on_gradient(self, param: torch.Tensor, reduced: torch.Tensor | None = None) -> None:
        """A gradient is accumulated, or `reduced`: send it if it is final; in mode `update` update buckets."""
        member = self._members[param]
        if self._asked is not None and not self._model_waits:
            raise checks.forward_before_begun_step()
        if reduced is None and self._waits is not None and self._open.prefetches:
            self._open.gradient_is_final(member)
        leaves = member.pieces and self._gradients.leave_in_backward(member, reduced)
        if self._is_accumulating or not leaves:
            self._gradients.keep(member)
            return
        self._check_usable()
        self._device.refuse_capture("optimizer offload")
        self._finish_begun()
        self._used.forget()
        self._send(member, reduced)

    def _send(self, member: Member, reduced: torch.Tensor | None) -> None:
        """Offload a gradient and put a stand-in in its place; changes nothing when it raises."""
        if self._in_backward is not None and member in self._in_backward.arrivals:
            raise checks.second_gradient(member)
        if self._gradients.send(member, reduced) and self._backward_overlap == "update":
            for bucket in self._open.completed_by(member):
                # A split member's other part is updated in step(), and both are published together.
                if self._in_backward is None:
                    self._follow_writes()
                    plan = StepPlan(snapshot(self.param_groups), None)
                written = self._open.compare(bucket)
                with as_one():
                    self._in_backward = self._in_backward or CpuStep(plan)
                    self._open.submit(bucket, self._in_backward, written)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let gradients add up on the device: put all micro-batches but the last inside."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def accumulate_while(self, asks: Callable[[], bool]) -> None:
        """Let gradients add up on the device where `asks()` says so: for a loop that cannot enter `accumulate()`."""
        self._asks_whether_accumulating = asks

    @property
    def _is_accumulating(self) -> bool:
        return self._accumulating or self._asks_whether_accumulating()

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those that have been sent off but not been used included.

        A step that has begun is finished first. Raises RuntimeError when backward has already started to use gradients
        (`backward_overlap="update"`).
        """
        if self._shares is not None:
            self._check_between_steps(checks.update_begun)
            self._check_usable()
            if self._asked is not None:
                self._finish_begun()
            self._used.forget()
            self._shares.discard(self._members.values())
            if not set_to_none:
                self._shares.wait_for(self._gradients.real_ones(self._members.values()))
                self._order_gathers(all_are_new=False)
                self._shares.fence()
        super().zero_grad(set_to_none)

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients of the last backward.

        With a model attached, returns when the work is queued; its forward waits for each weight. After an error
        `status` says whether the step has begun; one that has is finished by the next call, which takes another
        step only where there are new gradients.
        """
        with self._scaled_once():
            self._finish_earlier(asks=closure is None)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step()
            return loss

    def _step_has_raised(self, closure: Callable[[], Any] | None = None, *, is_left: bool = False) -> None:
        """Ask for the update that backward has begun, where a hook in front of `step()` has kept it from asking."""
        if closure is None:
            self._ask(checks_used=False)
        super()._step_has_raised(closure, is_left=self._asked is not None)

    @in_turn
    def _finish_earlier(self, *, asks: bool) -> None:
        """Finish the step or the load before; `asks` says that no closure comes before the next step."""
        # From here on no call refuses to finish an update that backward has begun, whatever is raised below.
        was_asked = self._asked is not None
        if asks:
            self._ask()
        self._check_usable()
        self._device.refuse_capture("optimizer offload")
        if was_asked or self._unwritten:
            self._finish_begun()

    @in_turn
    def _step(self) -> None:
        """Take a step, unless an error has told of one that has used these gradients."""
        if self._failures.told_begun and self._used.are_all(self._members.values()):
            return
        self._follow_groups()
        self._follow_writes()  # before the step is asked for: it waits for updates, which would carry that out
        self._ask()
        self._take()

    def _ask(self, *, checks_used: bool = True) -> None:
        """Ask for the rest of an update that backward has begun, once; raise where its gradients were dropped."""
        if self._in_backward is not None and self._asked is None:
            if checks_used:
                self._gradients.check_used_stand(self._in_backward.arrivals)
            self._asked = AskedGradients(self._members.values())

    def _take(self) -> None:
        """Take a step with the gradients that there are."""
        if late := self._gradients.used_by_nobody(self._members.values()):
            self._open.wait_for(late)
            self._order_gathers(all_are_new=False)
        prepared, stand_ins = self._prepare()
        members = [*prepared.step.arrivals, *prepared.arrivals, *prepared.gradients]
        others = standing_on(member for member in members if member not in stand_ins)
        standing = {**others, **stand_ins}
        if self._waits is not None:
            self._waits.on_step(standing)
        with self._beginning(standing, left_unseen=bool(members) and not standing):
            self._in_backward = self._asked = None
            put_in_place(stand_ins)
            self._open.begin(prepared)
            count_own(standing)
        if not self._returns_early:
            self._wait()

    def _finish_begun(self) -> None:
        self._write_rest()
        if self._asked is not None:
            self._asked.use(self._take, is_taken=lambda: self._asked is None)
            self._failures.told_begun = True

    @property
    def _returns_early(self) -> bool:
        return self._model_waits and self._overlaps_forward

    def _prepare(self) -> tuple[PreparedStep, dict[Member, GradientStandIn]]:
        """Do all of a step that may fail and changes nothing; return the stand-ins of its begin, too."""
        begun = self._in_backward
        gradients: dict[Member, torch.Tensor] = {}
        arrivals: dict[Member, Event] = {}
        for member in self._members.values():
            if begun is not None and member in begun.arrivals:
                continue
            gradient = self._gradients.to_use(member)
            if member.arrival is not None:
                arrivals[member] = member.arrival
            if gradient is not None and (member.on_device or not member.pieces):
                gradients[member] = gradient
        if self._open.prefetches or any(member.streamed for member in gradients):
            checks.check_used_in_time(member for member in gradients if member.streamed or member.matrices)
        factors, indices = factors_of(arrivals)
        if begun is not None:
            begun.plan.check_unchanged(self.param_groups, self.defaults)
            step, self.grad_norm = begun, None
        else:
            decision = self._decide(arrivals, gradients)
            step = CpuStep(StepPlan(snapshot(self.param_groups), decision), indices)
        prepared = self._open.prepare(step, arrivals, gradients, factors)
        stand_ins = self._gradients.stand_ins(
            arrivals, gradients, begun=step.arrivals, returns_early=self._returns_early
        )
        return prepared, stand_ins

    def _decide(
        self, sent_off: Mapping[Member, Event], gradients: Mapping[Member, torch.Tensor]
    ) -> ClipDecision | None:
        """Decide over all gradients, on the device; None when there are none."""
        scale = self._take_scale()
        decision = decide(
            self._gradients.norms(sent_off, gradients),
            self._device,
            reduce_norm_squared=self._reduce_norm_squared,
            max_norm=self._max_grad_norm,
            **scale,
        )
        self.grad_norm = decision.norm if decision is not None and self._gradients.measures else None
        return decision

    @property
    def _closed(self) -> bool:
        return self._shares is None

    @property
    def _moves_in_backward(self) -> bool:
        return self._backward_overlap != "nothing"

    def _status(self) -> Status:
        if self._shares is None:
            return "closed"
        if self._failures.first is not None:
            return "broken"
        begun = self._in_backward is not None or bool(self._unwritten)
        begun = begun or self._step_is_last(is_unqueued=self._shares.is_unqueued)
        return "begun" if begun else "untouched"

    @in_turn
    def _wait_for(self, members: Iterable[Member]) -> None:
        if self._shares is None:
            # While this waited for its turn somebody has closed it, and finished all.
            return
        if self._is_reader and self._in_backward is not None and self._asked is None:
            # Weights stay old until step(), or are new: nothing can be waited for meanwhile.
            return
        self._check_usable()
        self._finish_begun()
        listed = list(members)
        self._refuse_written(listed)
        self._seen_by_steps(lambda: self._open.wait_for(listed))

    @in_turn
    def synchronize(self) -> None:
        """Make the live current stream see finished weights: call it before reading them in your own code."""
        self._check_usable()
        self._finish_begun()
        self._refuse_written(self._members.values())
        self._wait()

    def _wait(self) -> None:
        self._seen_by_steps(lambda: self._open.wait_for(self._members.values()))
        self._order_gathers(all_are_new=True)
        self._open.drain()

    @in_turn
    def _finished(self, members: Iterable[Member]) -> Shares:
        """Return where states are, once no update of `members` runs. Raises RuntimeError when closed."""
        self._check_usable()
        self._wait_for(members)
        self._order_gathers(all_are_new=False)
        return self._open

    def _refresh(self, members: Sequence[Member]) -> None:
        checks.check_refresh(members)
        self._write(lambda: self._open.refresh_masters(members))

    def _check_between_steps(self, refusal: Callable[[], Exception]) -> None:
        """Raise `refusal` between a backward that has begun to update and its step."""
        if self._in_backward is not None and self._asked is None and self._failures.first is None:
            self._refused_in_between = True
            raise refusal()

    def _finish_for_saving(self) -> None:
        self._check_between_steps(checks.saved_in_between)
        self.synchronize()

    def _finish_for_close(self) -> None:
        begun_in_backward = self._in_backward is not None and self._asked is None
        was_told = self._failures.first is not None
        # Again: memory of a failed call is free by then, and a step cannot be finished once this is closed.
        for is_last in (False, True):
            try:
                self._open.drain() if begun_in_backward else self.synchronize()
                break
            except Exception:
                if was_told:
                    return
                if is_last or self._failures.first is not None:
                    raise
        if begun_in_backward and not self._refused_in_between and not was_told:
            raise checks.closed_in_between()

    def _let_go(self) -> None:
        self._backward.close()
        if self._shares is not None:
            self._unclosed.append(self._shares.close)
        self._shares = self._in_backward = self._asked = None
        self._unwritten.clear()

    def _check_usable(self) -> None:
        super()._check_usable()
        self._failures.check()
        self._open.check()
