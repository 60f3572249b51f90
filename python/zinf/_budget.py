"""BudgetError, which says what the memory held when it was raised."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator

import torch

from zinf import _C
from zinf.engine import Engine, open_engines, other_optimizers


class _Found(threading.local):
    """What the memory held when this thread was refused some."""

    refusal = ""
    text = ""
    looking = False


_found = _Found()


class BudgetError(RuntimeError):
    """A budget is too small; the text says for what, what the memory holds, and what to do."""

    def __init__(self, text: str = ""):
        is_refusal = bool(text) and text == _found.refusal  # not one that a user makes, or a copy
        super().__init__(text + _found.text if is_refusal else text)


BudgetError.__module__ = "zinf"


def _look(text: str) -> None:
    """Called before Python's frames let go of what they hold: an exception is made when it is caught."""
    engines = open_engines()
    if _found.looking or not engines or 'budget "host_memory"' not in text:
        return
    _found.looking = True
    try:
        _found.refusal, _found.text = text, _described(engines)
    finally:
        _found.looking = False


_C.set_budget_error(BudgetError, _look)


def _described(engines: list[Engine]) -> str:
    """What holds the memory, by size, and what would help."""
    stats = [engine.stats() for engine in engines]
    units = int(sum(each["resident_bytes"] for each in stats))
    rest = int(stats[0]["host_used_bytes"]) - units
    held = [(units, "managed weights, gradients and states")]
    ways = []
    for optimizer in other_optimizers():
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        values = [value for state in optimizer.state.values() for value in state.values()]
        states = _counted_bytes(value for value in values if isinstance(value, torch.Tensor))
        if states > 0:
            held.append((states, f"states of {name}"))
            ways.append(f"use zinf.AdamW: the states of {name} cannot leave memory")
            rest -= states
    parameters = list(_parameters())
    strangers = _counted_bytes(value for _, value in parameters)
    if strangers > 0:
        held.append((strangers, f"parameters that no engine manages ({parameters[0][0]})"))
        ways.append("build the model inside `with engine.init():`, or give it to engine.adopt()")
        rest -= strangers
    held.append((rest, "activations and other tensors"))
    if not all(engine._manager.nvme for engine in engines):
        ways.append("give nvme=: without it weights, gradients and states cannot leave memory")
    parts = [f"{size / (1 << 20):.1f} MiB of {what}" for size, what in sorted(held, reverse=True) if size > 0]
    return ". The memory holds " + ", ".join(parts) + "".join(f"; {way}" for way in ways)


def _parameters() -> Iterator[tuple[str, torch.Tensor]]:
    """Of modules, those that no engine manages and the budget counts."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module):
            for name, value in vars(thing).get("_parameters", {}).items():
                if value is not None and not _C.is_managed(value) and _C.is_counted(value):
                    yield f"{type(thing).__name__}.{name}", value


def _counted_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors if _C.is_counted(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
