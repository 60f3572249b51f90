"""What the optimizer keeps for each parameter."""

from __future__ import annotations

from typing import Any

import torch

from zinf import _C

NARROW = (torch.bfloat16, torch.float16)  # types of weights that need a master


def joined(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state with its master as a float32 tensor, which it is until the next update."""
    return {
        name: value.join(_C.shard_of(parameter)) if isinstance(value, _C.SplitMaster) else value
        for name, value in state.items()
    }


def copied(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state with a copy of its master in float32; the master stays split."""
    return {
        name: _copy(parameter, value) if isinstance(value, _C.SplitMaster) else value
        for name, value in state.items()
    }


def _copy(parameter: torch.Tensor, master: _C.SplitMaster) -> torch.Tensor:
    copy = master.copy(_C.shard_of(parameter))
    _C.adopt_state(parameter, copy, "master")  # all of them together need not fit in memory
    return copy
