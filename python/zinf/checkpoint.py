"""Checkpoints: every state of an engine in one store, with names, types and shapes."""

from __future__ import annotations

import io
import pickle
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
    _read_meta(buffer.getvalue())  # what could not be loaded is refused now
    tensors = _model_tensors(models)
    for index, optimizer in enumerate(optimizers):
        tensors += _state_tensors(models, optimizer, index)
    step = max((step for of in steps for step in of.values()), default=0)
    _C.save_tensors(path, tensors, step, buffer.getvalue())


def load(
    path: str, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
) -> tuple[int, Any]:
    reader = _C.TensorReader(path)
    data = reader.extra()
    if not data:
        raise ValueError(f"{path} is no checkpoint of an engine, or damaged: see zinf checkpoint verify")
    meta = _read_meta(data)
    if len(meta["groups"]) != len(optimizers):
        raise ValueError(
            f"{path} was saved with {len(meta['groups'])} optimizers, there are {len(optimizers)}"
        )
    for optimizer, groups in zip(optimizers, meta["groups"], strict=True):
        _check_groups(path, models, optimizer, groups)
    tensors = _model_tensors(models)
    expected = list(tensors)
    for index, (optimizer, steps) in enumerate(zip(optimizers, meta["steps"], strict=True)):
        expected += _expected_states(models, optimizer, index, steps)
    for named in expected:
        reader.check(*named)

    for optimizer in optimizers:  # until all is read
        optimizer._failure = f"engine.load({path!r}) was not finished"
    for index, (optimizer, steps) in enumerate(zip(optimizers, meta["steps"], strict=True)):
        _prepare_states(models, optimizer, steps)
        tensors += _state_tensors(models, optimizer, index)
    for named in tensors:
        reader.read(*named)
    for optimizer in optimizers:
        optimizer._failure = None
    for optimizer, groups, steps in zip(optimizers, meta["groups"], meta["steps"], strict=True):
        _restore_groups(models, optimizer, groups, steps)
    torch.set_rng_state(meta["rng"])
    version, state, gauss = meta["python_rng"]
    random.setstate((version, tuple(state), gauss))
    if meta["numpy_rng"] is not None:
        _set_numpy_rng(meta["numpy_rng"])
    return reader.step, meta["extra"]


def _read_meta(data: bytes) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "extra and parameter groups may hold tensors, numbers, texts, lists, tuples and dictionaries: "
            f"{str(error).splitlines()[0]}"
        ) from None


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


def _state_name(index: int, key: str) -> str:
    """Of the first optimizer "exp_avg", of the second "exp_avg:1"."""
    return f"{key}:{index}" if index else key


def tensors_of(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state of a parameter, with its master in float32, which it is until the next update."""
    return {
        name: value.join(parameter) if isinstance(value, _C.SplitMaster) else value
        for name, value in state.items()
    }


def _state_tensors(
    models: list[torch.nn.Module], optimizer: torch.optim.Optimizer, index: int
) -> list[Named]:
    names = _names(models)
    return [
        (_name_of(names, parameter), _state_name(index, key), value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in tensors_of(parameter, optimizer.state.get(parameter, {})).items()
        if key != "step"
    ]


def _expected_states(
    models: list[torch.nn.Module], optimizer: torch.optim.Optimizer, index: int, steps: dict[str, int]
) -> list[Named]:
    """What a checkpoint must have for an optimizer, as tensors without memory."""
    names = _names(models)
    expected: list[Named] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name_of(names, parameter)
            if name not in steps:
                continue
            keys = ["exp_avg", "exp_avg_sq"]
            keys += ["master"] if parameter.dtype in (torch.bfloat16, torch.float16) else []
            like = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            expected += [(name, _state_name(index, key), like) for key in keys]
    return expected


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
        if optimizer.state.get(parameter)
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
            if _name_of(names, parameter) not in steps:
                optimizer.state.pop(parameter, None)
            elif not optimizer.state.get(parameter):
                optimizer._make_state(parameter)


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
            if optimizer.state.get(parameter):
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
