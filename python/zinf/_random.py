"""The states of the random generators: torch's, Python's and numpy's, as things that can be stored."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    return {"rng": torch.get_rng_state(), "python_rng": random.getstate(), "numpy_rng": _numpy_rng()}


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["rng"])
    if states["python_rng"] is not None:  # as it is in a checkpoint of C++
        version, state, gauss = states["python_rng"]
        random.setstate((version, tuple(state), gauss))
    if states["numpy_rng"] is not None:
        _set_numpy_rng(states["numpy_rng"])


def _numpy_rng() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    state: Any = numpy.random.get_state()
    name, keys, position, has_gauss, gauss = state
    return name, keys.tolist(), position, has_gauss, gauss


def _set_numpy_rng(state: Any) -> None:
    import numpy

    name, keys, position, has_gauss, gauss = state
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
