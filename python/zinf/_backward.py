"""update="backward": parameters are updated inside backward, when their gradients are complete."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zinf import _C

if TYPE_CHECKING:
    from zinf.optim import AdamW


_optimizers = WeakIdKeyDictionary()  # by parameter: who updates it inside backward, weakly


class BackwardUpdate:
    """Hears of the gradients of an optimizer's parameters, and updates them when C++ says so.

    What happens to gradients in the backward passes of one step: adapters/torch/backward.h.
    """

    def __init__(self, optimizer: AdamW, micro_batches: int):
        reference = weakref.ref(optimizer)

        def fail(why: str) -> None:
            if (failed := reference()) is not None:
                failed._fail(why)

        self._optimizer = reference
        this = weakref.ref(self)

        def update(deferred: Sequence[torch.Tensor]) -> None:
            if (known := this()) is not None:
                known.update_deferred(deferred)

        def how() -> str:
            asked = reference()
            return "" if asked is None else asked._how()

        def finish() -> None:
            if (interrupted := reference()) is not None:
                if interrupted._backward.begun():
                    interrupted._finish_step()
                interrupted.zero_grad()

        self._passes = _C.BackwardUpdate(micro_batches, update, fail, how, finish)
        self._group_of = WeakIdKeyDictionary()  # the index of each parameter's group

    def watch(self, index: int, group: dict[str, Any]) -> None:
        self._check_alone(group["params"])
        for parameter in group["params"]:
            _optimizers[parameter] = self._optimizer
            if parameter.requires_grad and parameter not in self._group_of:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._passes.watch(parameter)
            self._group_of[parameter] = index

    def _check_alone(self, parameters: Sequence[torch.Tensor]) -> None:
        def shared() -> bool:
            return any(
                _optimizers.get(p, self._optimizer)() not in (None, self._optimizer()) for p in parameters
            )

        if not shared():
            return
        gc.collect()  # a scheduler and its optimizer know each other
        if shared():
            raise ValueError(
                'another optimizer with update="backward" has one of these parameters: a gradient is used '
                "once, so delete that optimizer first (del optimizer)"
            )

    def check_options(self, groups: Sequence[_C.AdamOptions]) -> None:
        """Refuses what should have been said before backward."""
        self._passes.check_options(groups)

    def begun(self) -> bool:
        """Whether there was a backward pass since the last step."""
        return self._passes.begun()

    def interrupted(self) -> bool:
        """Whether there was a SIGINT since the first update of the last step."""
        return self._passes.interrupted()

    def fixed_options(self, groups: Sequence[_C.AdamOptions]) -> list[_C.AdamOptions]:
        """What the updates inside backward have used, where there were any."""
        return self._passes.fixed_options(groups)

    def end_step(self, updated: Sequence[torch.Tensor] = ()) -> None:
        """step() has updated the rest, or a good state was loaded."""
        self._passes.end_step(updated)

    @torch._disable_dynamo  # compiled autograd would trace it
    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        optimizer._check_usable()
        if not self._passes.on_gradient(parameter, waits=optimizer.max_grad_norm is not None):
            return
        split = optimizer.master == "split"
        probe = _C.Probe.under_way()
        at_once = parameter.device.type != "cpu" or _C.update_bytes(parameter, split=split).weight_stays
        if probe is not None and at_once:
            probe.update(parameter, is_fresh=not optimizer.state.get(parameter), split=split)
            self._passes.end_update(parameter)
            return
        if probe is not None or not (at_once or optimizer.state.get(parameter)):
            _C.check_first_update(parameter, split=split)
            self._passes.defer(parameter)
            return
        optimizer._prepare([parameter], check=False)
        self._update(optimizer, parameter)

    def update_deferred(self, parameters: Sequence[torch.Tensor]) -> None:
        """Those that wait until the end of a pass, or until other ranks have their gradients too.

        What another optimizer has is left to it.
        """
        optimizer = self._optimizer()
        if optimizer is None or _C.Probe.under_way() is not None:
            return
        mine = [parameter for parameter in parameters if parameter in self._group_of]
        with _C.HeldInterrupts(), torch.no_grad():
            optimizer._prepare(mine)
            for parameter in mine:
                self._update(optimizer, parameter)

    def _update(self, optimizer: AdamW, parameter: torch.Tensor) -> None:
        index = self._group_of[parameter]
        options = self._passes.begin_update(index, optimizer._options(optimizer.param_groups[index]))
        optimizer._update([parameter], options)
        self._passes.end_update(parameter)
