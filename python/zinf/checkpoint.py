"""Checkpoints: every state of an engine in one store, with names, types and shapes."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from zinf import _C
from zinf._random import random_states, set_random_states
from zinf._states import NARROW

if TYPE_CHECKING:
    from zinf.optim import AdamW

Named = tuple[str, str, torch.Tensor]  # unit, state, tensor


def save(path: str, models: list[torch.nn.Module], optimizers: list[AdamW], extra: Any) -> None:
    for optimizer in optimizers:
        if optimizer._failure is not None:
            raise RuntimeError(
                f"save: weights and states do not fit together ({optimizer._failure}): "
                "load a good state first"
            )
    steps = [_steps(models, optimizer) for optimizer in optimizers]
    meta = {
        "groups": [_groups(models, optimizer) for optimizer in optimizers],
        "steps": steps,
        **random_states(),
        "extra": extra,
    }
    data = _encode_meta(meta)
    tensors: list[tuple[str, str, torch.Tensor, _C.SplitMaster | None]] = [
        (*named, None) for named in _model_tensors(models)
    ]
    for index, optimizer in enumerate(optimizers):
        for name, key, parameter, value in _states(models, optimizer, index):
            split = isinstance(value, _C.SplitMaster)
            tensors.append((name, key, parameter, value) if split else (name, key, value, None))
    step = max((step for of in steps for step in of.values()), default=0)
    _C.save_tensors(path, tensors, step, data)


def load(
    path: str, manager: _C.Manager, models: list[torch.nn.Module], optimizers: list[AdamW]
) -> tuple[int, Any]:
    reader, meta = _open(path)
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

    with _unfinished(path, manager, optimizers):
        # What could not be read or written before is whole again when it was replaced: so nothing here may
        # need old content, a weight that of its master neither.
        manager.abandon_updates()
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                _renewed(parameter, state.get("master"))
        for named in tensors:
            reader.read(*named)
        for index, (optimizer, steps) in enumerate(zip(optimizers, meta["steps"], strict=True)):
            _prepare_states(models, optimizer, steps)
            for name, key, parameter, value in _states(models, optimizer, index):
                reader.read(name, key, _renewed(parameter, value))
    for model in models:
        model.zero_grad()  # of a step that the saved run has not begun
    for optimizer in optimizers:
        optimizer._heal()
    for optimizer, groups, steps in zip(optimizers, meta["groups"], meta["steps"], strict=True):
        _restore_groups(models, optimizer, groups, steps)
    set_random_states(meta)
    return reader.step, meta["extra"]


def load_weights(
    path: str, manager: _C.Manager, models: list[torch.nn.Module], optimizers: list[AdamW]
) -> tuple[int, Any]:
    """Weights and buffers alone: what the optimizers have stays."""
    reader, meta = _open(path)
    tensors = _model_tensors(models)
    for named in tensors:
        reader.check(*named)
    with _unfinished(path, manager, optimizers):
        for named in tensors:
            reader.read(*named)
    return reader.step, meta["extra"]


@contextlib.contextmanager
def _unfinished(path: str, manager: _C.Manager, optimizers: list[AdamW]) -> Iterator[None]:
    """Nobody uses what an exception inside it leaves behind."""
    why = f"engine.load({path!r}) was not finished"
    before = [optimizer._failure for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer._failure = why
    try:
        yield
    except BaseException:
        manager.fail(why)
        raise
    for optimizer, failure in zip(optimizers, before, strict=True):
        optimizer._failure = failure


def _renewed(parameter: torch.Tensor, value: Any) -> Any:
    """Of a split master a tensor that may be written to."""
    return value.renew(parameter) if isinstance(value, _C.SplitMaster) else value


def _open(path: str) -> tuple[_C.TensorReader, dict[str, Any]]:
    if not os.path.exists(path):
        raise FileNotFoundError(f"load: {path} does not exist: name a directory that engine.save() has made")
    if not os.path.isfile(os.path.join(path, "volume.zinf")):
        raise ValueError(f"load: {path} is no checkpoint (it has no volume.zinf): {_hint(path)}")
    try:
        reader = _C.TensorReader(path)
        data = reader.extra()
    except RuntimeError as error:
        raise RuntimeError(f"load: {path} is no whole checkpoint: {error}") from None
    if not data:
        raise ValueError(f"{path} is no checkpoint of an engine, or damaged: see zinf checkpoint verify")
    try:
        return reader, _decode(data)
    except pickle.UnpicklingError as error:
        raise ValueError(f"load: {path} has an extra of types that are not known here") from error


def _hint(path: str) -> str:
    """What else to name than `path`."""
    inside = [] if not os.path.isdir(path) else sorted(os.listdir(path))
    inside = [name for name in inside if os.path.isfile(os.path.join(path, name, "volume.zinf"))]
    if not inside:
        return "name a directory that engine.save() has made"
    return f"name one of those in it, such as {os.path.join(path, inside[-1])}"


def _encode_meta(meta: dict[str, Any]) -> bytes:
    """What could not be loaded again is refused now."""
    for key, name in (("extra", "extra"), ("groups", "parameter groups")):
        if not _can_be_stored(meta[key]):
            where, value = _bad_part(meta[key], name)
            raise ValueError(
                f"save: {where} is of type {type(value).__name__}, which cannot be stored: extra and "
                "parameter groups may hold tensors, numbers, texts, None, numpy's numbers and arrays of "
                "numbers, and lists, tuples and dictionaries of these"
            )
    return _encode(meta)


def _can_be_stored(value: Any) -> bool:
    try:
        _decode(_encode(value))
    except Exception:  # a value's own code may raise anything
        return False
    return True


def _bad_part(value: Any, name: str) -> tuple[str, Any]:
    """The name and value of the innermost part that cannot be stored."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts += [(f"the key {key!r} of {name}", key) for key in value]
        parts += [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts += [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    for inner, part in parts:
        if not _can_be_stored(part):
            return _bad_part(part, inner)
    return name, value


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> Any:
    with torch.serialization.safe_globals(_more_types()):
        return torch.load(io.BytesIO(data), weights_only=True)


@functools.cache
def _more_types() -> list[Any]:
    """What torch.load() must know to read b"", and numpy's numbers and arrays of numbers."""
    try:
        import numpy
    except ImportError:
        return [bytes]
    codes = "?" + numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"]
    makers = [numpy.zeros(1).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    return [bytes, numpy.ndarray, numpy.dtype, *makers, *{type(numpy.dtype(code)) for code in codes}]


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


def _states(
    models: list[torch.nn.Module], optimizer: AdamW, index: int
) -> list[tuple[str, str, torch.Tensor, Any]]:
    """Name of the unit, name of the state, parameter and what the optimizer has for it."""
    names = _names(models)
    return [
        (_name_of(names, parameter), _state_name(index, key), parameter, value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
        if key != "step"
    ]


def _expected_states(
    models: list[torch.nn.Module], optimizer: AdamW, index: int, steps: dict[str, int]
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
            keys += ["master"] if parameter.dtype in NARROW else []
            like = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            expected += [(name, _state_name(index, key), like) for key in keys]
    return expected


def _name_of(names: dict[torch.Tensor, str], parameter: torch.Tensor) -> str:
    if parameter not in names:
        raise ValueError("the optimizer has a parameter that is in none of the engine's models")
    return names[parameter]


def _steps(models: list[torch.nn.Module], optimizer: AdamW) -> dict[str, int]:
    names = _names(models)
    return {
        _name_of(names, parameter): int(optimizer.state[parameter]["step"].item())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }


def _groups(models: list[torch.nn.Module], optimizer: AdamW) -> list[dict[str, Any]]:
    names = _names(models)
    return [
        {**group, "params": [_name_of(names, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _check_groups(
    path: str, models: list[torch.nn.Module], optimizer: AdamW, saved: list[dict[str, Any]]
) -> None:
    now = [group["params"] for group in _groups(models, optimizer)]
    then = [group["params"] for group in saved]
    if now != then:
        raise ValueError(f"{path} was saved with other parameter groups: {then} there, {now} here")


def _prepare_states(models: list[torch.nn.Module], optimizer: AdamW, steps: dict[str, int]) -> None:
    names = _names(models)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _name_of(names, parameter) not in steps:
                optimizer.state.pop(parameter, None)
            elif not optimizer.state.get(parameter):
                optimizer._make_state(parameter)


def _restore_groups(
    models: list[torch.nn.Module],
    optimizer: AdamW,
    groups: list[dict[str, Any]],
    steps: dict[str, int],
) -> None:
    names = _names(models)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                optimizer.state[parameter]["step"].fill_(steps[_name_of(names, parameter)])
