"""What a training step needs of host_memory, measured without training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from zinf import _C
from zinf._random import random_states, set_random_states

if TYPE_CHECKING:
    from zinf.engine import Engine
    from zinf.optim import AdamW


def measure(engine: Engine, step: Callable[[], Any]) -> _C.Need:
    """What stands for the updates meanwhile, and keeps gradients and buffers: adapters/torch/probe.h."""
    optimizers = engine._optimizers()
    for optimizer in optimizers:
        if optimizer._backward is not None and optimizer._backward.begun():
            raise RuntimeError("probe() between backward and step(): call it after step()")
    models = engine._roots()
    parameters = [named for model in models for named in model.named_parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    with _unchanged(models, optimizers):
        probe = _C.Probe.begin(engine._manager, parameters, buffers)
        try:
            for optimizer in optimizers:
                optimizer._hold_states(probe)
            step()
            for optimizer in optimizers:
                optimizer.step()
        finally:
            need = probe.end()
    probe.check_weights()
    return need


@contextlib.contextmanager
def _unchanged(models: list[torch.nn.Module], optimizers: list[AdamW]) -> Iterator[None]:
    """What only Python knows is afterwards what it was."""
    buffers = [(module, dict(module._buffers)) for model in models for module in model.modules()]
    random = random_states()
    try:
        yield
    finally:
        set_random_states(random)
        for module, its_buffers in buffers:
            module._buffers.update(its_buffers)
        for optimizer in optimizers:
            if optimizer._backward is not None:
                optimizer._backward.end_step()
