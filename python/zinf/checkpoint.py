"""Checkpoints: every state of an engine in one store, with names, types and shapes."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zinf import _C
from zinf._parts import Parts, folder_name, folders_in
from zinf._random import random_states, set_random_states
from zinf._ranks import patience, short_hash
from zinf._states import NARROW

if TYPE_CHECKING:
    from zinf.optim import AdamW

Named = tuple[str, str, torch.Tensor]  # unit, state, tensor
_T = TypeVar("_T")


def save(
    path: str, manager: _C.Manager, models: list[torch.nn.Module], optimizers: list[AdamW], extra: Any
) -> None:
    if manager.ranks is None:
        _check_models(models)
        _C.save_tensors(path, *_content(models, optimizers, extra))
    else:
        slices = manager.ranks.num_slices
        _save_slices(path, manager.ranks, models, lambda: _content(models, optimizers, extra, slices))


def _check_models(models: list[torch.nn.Module]) -> None:
    if not _model_tensors(models):
        raise RuntimeError(
            "save: the engine has no model, so there is nothing to write: a model is built inside init() or "
            "given to adopt(), and kept in a variable until save() has returned"
        )


def _content(
    models: list[torch.nn.Module], optimizers: list[AdamW], extra: Any, slices: int = 1
) -> tuple[list[Any], int, bytes]:
    """Tensors, the step and the rest for save_tensors(): of a split parameter what is kept here."""
    for optimizer in optimizers:
        if optimizer._failure is not None:
            raise RuntimeError(
                f"save: weights and states do not fit together ({optimizer._failure}): "
                "load a good state first"
            )
    steps = [_steps(models, optimizer) for optimizer in optimizers]
    named = _model_tensors(models)
    meta = {
        "groups": [_groups(models, optimizer) for optimizer in optimizers],
        "steps": steps,
        **random_states(),
        "extra": extra,
        "slices": slices,
        "layouts": {name: [list(tensor.shape), list(tensor.stride())] for name, _, tensor in named},
    }
    tensors: list[tuple[str, str, torch.Tensor, _C.SplitMaster | None]] = [
        (name, state, _C.shard_of(tensor), None) for name, state, tensor in named
    ]
    for index, optimizer in enumerate(optimizers):
        for name, key, parameter, value in _states(models, optimizer, index):
            split = isinstance(value, _C.SplitMaster)
            tensors.append((name, key, _C.shard_of(parameter), value) if split else (name, key, value, None))
    step = max((step for of in steps for step in of.values()), default=0)
    return tensors, step, _encode_meta(meta)


def _save_slices(
    path: str,
    ranks: _C.Ranks,
    models: list[torch.nn.Module],
    content: Callable[[], tuple[list[Any], int, bytes]],
) -> None:
    """A store per rank; the directory has its name when all of them are whole and on the disk."""
    _meet(ranks, "save", path)
    _together(ranks, lambda: _check_models(models))
    is_replica = ranks.rank >= ranks.num_slices  # the first group has all slices
    parents: _C.NewParents | None = None
    directory: _C.NewDirectory | None = None

    def write() -> _C.WrittenTensors:
        tensors, step, data = content()
        tensors = [each for each in tensors if each[2].numel() > 0]
        if is_replica:
            tensors = [each for each in tensors if each[1] == "buffer"]
        return _C.WrittenTensors(os.path.dirname(os.path.abspath(path)), tensors, step, data)

    try:
        parents = _on_first(ranks, lambda: _C.NewParents(path))
        ranks.flush()
        written = _together(ranks, write)
        directory = _on_first(ranks, lambda: _C.NewDirectory(path))
        unfinished = _path_on_first(ranks, path, directory)
        folder = os.path.join(unfinished, folder_name(ranks.rank, ranks.size))
        _together(ranks, lambda: written.link(folder))
        _on_first(ranks, lambda: directory.publish())  # type: ignore[union-attr]
    except BaseException:
        if directory is not None:
            directory.remove()
        if parents is not None:
            parents.remove()
        raise
    if parents is not None:
        parents.keep()


def _path_on_first(ranks: _C.Ranks, path: str, directory: _C.NewDirectory | None) -> str:
    """Where the first rank has made the directory: its name ends with 16 digits that cannot be guessed."""
    digits = "0" * 16 if directory is None else directory.path[-16:]
    halves = [ranks.sum(float(int(half, 16))) for half in (digits[:8], digits[8:])]
    return f"{os.path.abspath(path)}.unfinished-" + "".join(f"{int(half):08x}" for half in halves)


def _meet(ranks: _C.Ranks, what: str, path: str) -> None:
    """Raises on all ranks when one of them does something else, or elsewhere."""
    end = path if len(path) <= 24 else f"...{path[-21:]}"
    ranks.meet(f'engine.{what}("{end}"), {short_hash(path)}', patience())


def _on_first(ranks: _C.Ranks, do: Callable[[], _T]) -> _T | None:
    """What it gives on the first rank; None on the others."""
    return _together(ranks, do if ranks.rank == 0 else lambda: None)


def _together(ranks: _C.Ranks | None, do: Callable[[], _T]) -> _T:
    """Every rank does its own; when one has failed all of them raise. Alone: just that."""
    if ranks is None:
        return do()
    failure: Exception | None = None
    try:
        done = do()
    except Exception as error:
        failure = error
    failed = ranks.sum(float(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("another rank has failed at the same place: its message says why")
    return done


def load(
    path: str, manager: _C.Manager, models: list[torch.nn.Module], optimizers: list[AdamW]
) -> tuple[int, Any]:
    parts, meta, tensors = _begin_load(
        path, manager, models, lambda meta: _states_in(path, models, optimizers, meta)
    )

    def read() -> None:
        # What could not be read or written before is whole again when it was replaced: so nothing here may
        # need old content, a weight that of its master neither.
        manager.abandon_updates()
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                _renewed(parameter, state.get("master"))
        _read_model(parts, tensors)
        for index, (optimizer, steps) in enumerate(zip(optimizers, meta["steps"], strict=True)):
            _prepare_states(models, optimizer, steps)
            for name, key, parameter, value in _states(models, optimizer, index):
                into = _renewed(parameter, value)
                parts.read(name, key, parameter if _C.is_split(parameter) else into, into)

    with _unfinished(path, manager, optimizers):
        _together(manager.ranks, read)
        _outdate(manager, tensors)
    for model in models:
        model.zero_grad()  # of a step that the saved run has not begun
    for optimizer in optimizers:
        optimizer._heal()
    for optimizer, groups, steps in zip(optimizers, meta["groups"], meta["steps"], strict=True):
        _restore_groups(models, optimizer, groups, steps)
    set_random_states(meta)
    return parts.step, meta["extra"]


def load_weights(
    path: str, manager: _C.Manager, models: list[torch.nn.Module], optimizers: list[AdamW]
) -> tuple[int, Any]:
    """Weights and buffers alone: what the optimizers have stays."""
    parts, meta, tensors = _begin_load(path, manager, models, lambda meta: [])
    with _unfinished(path, manager, optimizers):
        _together(manager.ranks, lambda: _read_model(parts, tensors))
        _outdate(manager, tensors)
    return parts.step, meta["extra"]


def _begin_load(
    path: str,
    manager: _C.Manager,
    models: list[torch.nn.Module],
    states_in: Callable[[dict[str, Any]], list[Named]],
) -> tuple[Parts, dict[str, Any], list[Named]]:
    """Refuses what does not fit before anything changes; from here on no rank reads what was there."""
    tensors = _model_tensors(models)

    def check() -> tuple[Parts, dict[str, Any]]:
        parts, meta = _open(path, manager)
        _check(parts, tensors, states_in(meta))
        return parts, meta

    if manager.ranks is not None:
        _meet(manager.ranks, "load", path)
        manager.ranks.flush()
    return *_together(manager.ranks, check), tensors


def _states_in(
    path: str, models: list[torch.nn.Module], optimizers: list[AdamW], meta: dict[str, Any]
) -> list[Named]:
    """What a checkpoint must have for the optimizers."""
    if len(meta["groups"]) != len(optimizers):
        raise ValueError(
            f"{path} was saved with {len(meta['groups'])} optimizers, there are {len(optimizers)}"
        )
    for optimizer, groups in zip(optimizers, meta["groups"], strict=True):
        _check_groups(path, models, optimizer, groups)
    expected: list[Named] = []
    for index, (optimizer, steps) in enumerate(zip(optimizers, meta["steps"], strict=True)):
        expected += _expected_states(models, optimizer, index, steps)
    return expected


def _check(parts: Parts, tensors: list[Named], states: list[Named]) -> None:
    for name, state, tensor in tensors:
        if state == "buffer":
            parts.check_buffer(name, tensor)
        else:
            parts.check(name, state, tensor)
    for named in states:
        parts.check(*named)


def _read_model(parts: Parts, tensors: list[Named]) -> None:
    for name, state, tensor in tensors:
        if state == "buffer":
            parts.read_buffer(name, tensor)
        else:
            kept = _C.shard_of(tensor) if _C.is_split(tensor) else tensor
            parts.read(name, state, tensor, kept)


def _outdate(manager: _C.Manager, tensors: list[Named]) -> None:
    """All ranks have written their slices: what was gathered before is old."""
    if manager.ranks is not None:
        manager.ranks.sum(0.0)
        manager.ranks.outdate([tensor for _, _, tensor in tensors if _C.is_split(tensor)])


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
    return value.renew(_C.shard_of(parameter)) if isinstance(value, _C.SplitMaster) else value


def _open(path: str, manager: _C.Manager) -> tuple[Parts, dict[str, Any]]:
    if not os.path.exists(path):
        raise FileNotFoundError(f"load: {path} does not exist: name a directory that engine.save() has made")
    folders = folders_in(path)
    if not folders and not os.path.isfile(os.path.join(path, "volume.zinf")):
        raise ValueError(f"load: {path} is no checkpoint (it has no volume.zinf): {_hint(path)}")
    rank = 0 if manager.ranks is None else manager.ranks.rank
    try:
        parts = Parts(path, folders, rank, _decode)
    except pickle.UnpicklingError as error:
        raise ValueError(f"load: {path} has an extra of types that are not known here") from error
    except RuntimeError as error:
        raise RuntimeError(f"load: {path} is no whole checkpoint: {error}") from None
    if parts.meta is None:
        raise ValueError(f"{path} is no checkpoint of an engine, or damaged: see zinf checkpoint verify")
    return parts, parts.meta


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
