"""What a training step needs of host_memory, measured without training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zinf import _C
from zinf._random import random_states, set_random_states

if TYPE_CHECKING:
    from zinf.engine import Engine
    from zinf.optim import AdamW


@dataclass(frozen=True)
class Need:
    """What engine.probe() has found."""

    least_bytes: int  # of host_memory, for this step
    limit_bytes: int  # host_memory as it is

    @property
    def fits(self) -> bool:
        return self.least_bytes <= self.limit_bytes

    def __str__(self) -> str:
        verdict = "it fits" if self.fits else "it does not fit"
        return (
            f"the step needs host_memory of {_text(self.least_bytes)} or more: {verdict} "
            f"in {_text(self.limit_bytes)}"
        )


_CHUNK = 2 << 20  # tensors take memory in so large pieces


def _text(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


_under_way: Probe | None = None  # one at a time: the budget is the process's


def probe_under_way() -> Probe | None:
    return _under_way


class Probe:
    """Stands for the updates while a step is measured: it takes their memory and changes nothing."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._held: list[_C.HostReservation] = []  # for states that will stay
        self._stepped: set[AdamW] = set()

    def step(self, optimizer: AdamW) -> None:
        """In the place of optimizer.step()."""
        self._stepped.add(optimizer)
        self._engine._manager.adopt_offered()
        due = [parameter for parameter in optimizer._parameters() if optimizer._is_due(parameter)]
        self.hold(optimizer, due)
        needs = [_needs(optimizer, parameter).moving for parameter in due if _C.is_managed(parameter)]
        _C.HostReservation(max(needs, default=0))

    def update(self, optimizer: AdamW, parameter: torch.Tensor) -> None:
        """In the place of an update inside backward, of a weight that stays in memory."""
        self.hold(optimizer, [parameter])
        needs = _needs(optimizer, parameter)
        _C.HostReservation(needs.moving - needs.grad)

    def finish(self, optimizers: list[AdamW]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._stepped:
                optimizer.step()

    def hold(self, optimizer: AdamW, parameters: list[torch.Tensor]) -> None:
        """Memory for the states that their first update would make, if those stay."""
        new = [p for p in parameters if _C.is_managed(p) and not optimizer.state.get(p)]
        self._held.append(_C.HostReservation(sum(_needs(optimizer, p).new_states for p in new)))


def _needs(optimizer: AdamW, parameter: torch.Tensor) -> _C.UpdateBytes:
    return _C.update_bytes(parameter, split=optimizer.master == "split")


def measure(engine: Engine, step: Callable[[], Any]) -> Need:
    global _under_way
    if _under_way is not None:
        raise RuntimeError("probe() inside probe()")
    optimizers = engine._optimizers()
    for optimizer in optimizers:
        if optimizer._backward is not None and optimizer._backward.begun():
            raise RuntimeError("probe() between backward and step(): call it after step()")
    with _unchanged(engine, optimizers):
        try:
            _under_way = Probe(engine)
            engine._manager.start_measuring()
            step()
            _under_way.finish(optimizers)
        finally:
            _under_way = None
            least = engine._manager.stop_measuring()
    least += max(least // 32, 2 * _CHUNK)  # pieces of memory fit together differently from run to run
    return Need(least, engine.stats()["host_limit_bytes"])


@contextlib.contextmanager
def _unchanged(engine: Engine, optimizers: list[AdamW]) -> Iterator[None]:
    """Gradients, buffers and random states are afterwards what they were."""
    models = engine._roots()
    parameters = [(name, parameter) for model in models for name, parameter in model.named_parameters()]
    grads = [(parameter, parameter.grad) for _, parameter in parameters]
    versions = [parameter._version for _, parameter in parameters]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for model in models
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    random = random_states()
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        set_random_states(random)
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer
                buffer.copy_(content)
        for parameter, grad in grads:
            parameter.grad = grad
        for optimizer in optimizers:
            if optimizer._backward is not None:
                optimizer._backward.end_step()
    for (name, parameter), version in zip(parameters, versions, strict=True):
        if parameter._version != version:
            raise RuntimeError(
                f"the probed step has changed {name}: probe() only holds back the updates of zinf.AdamW"
            )
