"""update="backward": parameters are updated inside backward, when their gradients are complete."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zinf import _C
from zinf._budget import moving_bytes
from zinf._probe import probe_under_way
from zinf.engine import engine_of

if TYPE_CHECKING:
    from zinf.optim import AdamW


class BackwardUpdate:
    """What happens to an optimizer's parameters in the backward passes of one step.

    A gradient that was used is replaced by a tensor that raises when it is touched. What is not managed, what
    waits for the norm of all gradients (max_grad_norm), and what the last of several passes did not reach, is
    left for step().
    """

    def __init__(self, optimizer: AdamW, micro_batches: int):
        self._optimizer = weakref.ref(optimizer)
        self._micro_batches = micro_batches
        self._group_of = WeakIdKeyDictionary()  # the index of each parameter's group
        self._pass: weakref.ref[_Pass] | None = None  # that is under way
        self._passes = 0  # since the last step
        self._changed = False  # a weight, in the pass that is under way
        self._updated: set[torch.Tensor] = set()  # in this step
        self._first: list[torch.Tensor] = []  # to be updated at the end of the pass: their first time
        self._fixed: dict[int, dict[str, float]] = {}  # options of the groups that were used

    def watch(self, index: int, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in self._group_of:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
            self._group_of[parameter] = index

    def check_options(self, optimizer: AdamW) -> None:
        """Refuses what should have been said before backward."""
        changed = [
            name
            for index, before in self._fixed.items()
            for name, now in optimizer._options(optimizer.param_groups[index]).items()
            if now != before[name]
        ]
        if changed:
            raise RuntimeError(
                f"{changed[0]} was changed between backward and step(), but the weights are updated already "
                '(update="backward"): change it after step()'
            )

    def begun(self) -> bool:
        return self._passes > 0

    def begin_step(self) -> None:
        self._updated.clear()
        self._fixed.clear()
        self._passes = 0

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        optimizer._check_usable()
        self._enter_pass()
        if parameter in self._updated or self._passes >= self._micro_batches:
            raise RuntimeError(
                'a second backward before step(): with update="backward" say how many there are, '
                f"zinf.AdamW(..., micro_batches={self._passes + 1})"
            )
        if not _C.is_managed(parameter):
            return
        if self._passes + 1 < self._micro_batches or optimizer.max_grad_norm is not None:
            _C.offer_gradient(parameter)
            return
        self._updated.add(parameter)
        probe = probe_under_way()
        if probe is not None:
            probe.update(optimizer, parameter)
        elif not optimizer.state.get(parameter) and "weights" not in engine_of(parameter)._fixed:
            self._try_first(optimizer, parameter)
        else:
            self._update(optimizer, [parameter])

    def _try_first(self, optimizer: AdamW, parameter: torch.Tensor) -> None:
        """Whether updates fit is seen while no weight is changed yet; they wait for the end of the pass."""
        split = optimizer.master == "split"
        _C.HostReservation(moving_bytes(engine_of(parameter), parameter, split, has_grad=True))
        _C.offer_gradient(parameter)
        self._first.append(parameter)

    @torch.no_grad()
    def _update(self, optimizer: AdamW, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            index = self._group_of[parameter]
            self._fixed.setdefault(index, optimizer._options(optimizer.param_groups[index]))
        optimizer._prepare(parameters)
        self._changed = True
        for parameter in parameters:
            optimizer._update([parameter], self._fixed[self._group_of[parameter]], 1.0, 1.0)
            _C.consume_gradient(parameter)

    def _enter_pass(self) -> None:
        current = None if self._pass is None else self._pass()
        if current is None:
            current = _Pass(self)
            self._changed = False
            self._pass = weakref.ref(current)
            torch.autograd.Variable._execution_engine.queue_callback(current)

    def _leave_pass(self, whole: bool) -> None:
        self._pass = None
        first, self._first = self._first, []
        optimizer = self._optimizer()
        if optimizer is None:
            return
        try:
            if whole and first:
                self._update(optimizer, first)
        except BaseException:
            whole = False
            raise
        finally:
            if whole:
                self._passes += 1
            elif self._changed:
                optimizer._fail("an exception inside backward left some weights updated and others not")
            else:
                self._updated.difference_update(first)


class _Pass:
    """Called by autograd at the end of a backward pass, or only dropped when an exception ended it."""

    def __init__(self, update: BackwardUpdate):
        self._update: BackwardUpdate | None = update

    def __call__(self) -> None:
        self._leave(True)

    def __del__(self) -> None:
        self._leave(False)

    def _leave(self, whole: bool) -> None:
        update, self._update = self._update, None
        if update is not None:
            update._leave_pass(whole)
