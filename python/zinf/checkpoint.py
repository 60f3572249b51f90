"""Checkpoints: every state of an engine in one store, with names, types and shapes."""

from __future__ import annotations

import io
import random
from typing import Any

import torch

from zinf import _C

Named = tuple[str, str, torch.Tensor]  # unit, state, tensor


def save(
    path: str, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], extra: Any
) -> None:
    steps = [_steps(models, optimizer) for optimizer in optimizers]
    meta = {
        "groups": [_groups(models, optimizer) for optimizer in optimizers],
        "steps": steps,
        "rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
        "numpy_rng": _numpy_rng(),
        "extra": extra,
    }
    buffer = io.BytesIO()
    torch.save(meta, buffer)
    tensors = _model_tensors(models)
    for optimizer in optimizers:
        tensors += _state_tensors(models, optimizer)
    step = max((step for of in steps for step in of.values()), default=0)
    _C.save_tensors(path, tensors, step, buffer.getvalue())


def load(
    path: str, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
) -> tuple[int, Any]:
    reader = _C.TensorReader(path)
    meta = torch.load(io.BytesIO(reader.extra()), weights_only=True)
    if len(meta["groups"]) != len(optimizers):
        raise ValueError(
            f"{path} was saved with {len(meta['groups'])} optimizers, there are {len(optimizers)}"
        )
    for optimizer, groups in zip(optimizers, meta["groups"], strict=True):
        _check_groups(path, models, optimizer, groups)
    tensors = _model_tensors(models)
    for named in tensors:
        reader.check(*named)
    for optimizer, steps in zip(optimizers, meta["steps"], strict=True):
        _prepare_states(models, optimizer, steps)
        tensors += _state_tensors(models, optimizer)
    for named in tensors:
        reader.read(*named)
    for optimizer, groups, steps in zip(optimizers, meta["groups"], meta["steps"], strict=True):
        _restore_groups(models, optimizer, groups, steps)
    torch.set_rng_state(meta["rng"])
    version, state, gauss = meta["python_rng"]
    random.setstate((version, tuple(state), gauss))
    if meta["numpy_rng"] is not None:
        _set_numpy_rng(meta["numpy_rng"])
    return reader.step, meta["extra"]


def _names(models: list[torch.nn.Module]) -> dict[torch.Tensor, str]:
    """Every parameter's name; several models are told apart by their number."""
    names: dict[torch.Tensor, str] = {}
    for prefix, model in _prefixed(models):
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, prefix + name)
    return names


def _prefixed(models: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    if len(models) == 1:
        return [("", models[0])]
    return [(f"{index}:", model) for index, model in enumerate(models)]


def _model_tensors(models: list[torch.nn.Module]) -> list[Named]:
    tensors: list[Named] = []
    for prefix, model in _prefixed(models):
        tensors += [(prefix + name, "weight", tensor) for name, tensor in model.named_parameters()]
        tensors += [(prefix + name, "buffer", tensor) for name, tensor in model.named_buffers()]
    return tensors


def _state_tensors(models: list[torch.nn.Module], optimizer: torch.optim.Optimizer) -> list[Named]:
    names = _names(models)
    tensors: list[Named] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                if key != "step":
                    tensors.append((_name_of(names, parameter), key, value))
    return tensors


def _name_of(names: dict[torch.Tensor, str], parameter: torch.Tensor) -> str:
    if parameter not in names:
        raise ValueError("the optimizer has a parameter that is in none of the engine's models")
    return names[parameter]


def _steps(models: list[torch.nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    names = _names(models)
    return {
        _name_of(names, parameter): int(optimizer.state[parameter]["step"].item())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state[parameter]
    }


def _groups(models: list[torch.nn.Module], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = _names(models)
    return [
        {**group, "params": [_name_of(names, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _check_groups(
    path: str, models: list[torch.nn.Module], optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> None:
    now = [group["params"] for group in _groups(models, optimizer)]
    then = [group["params"] for group in saved]
    if now != then:
        raise ValueError(f"{path} was saved with other parameter groups: {then} there, {now} here")


def _prepare_states(
    models: list[torch.nn.Module], optimizer: torch.optim.Optimizer, steps: dict[str, int]
) -> None:
    names = _names(models)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if _name_of(names, parameter) not in steps:
                state.clear()
            elif not state:
                optimizer._make_state(parameter, state)


def _restore_groups(
    models: list[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    steps: dict[str, int],
) -> None:
    names = _names(models)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                optimizer.state[parameter]["step"].fill_(steps[_name_of(names, parameter)])


def _numpy_rng() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    return name, keys.tolist(), position, has_gauss, gauss


def _set_numpy_rng(state: Any) -> None:
    import numpy

    name, keys, position, has_gauss, gauss = state
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
