"""Whether a model and its optimizer can be trained within host_memory at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zinf import _C
from zinf._states import NARROW

if TYPE_CHECKING:
    from zinf.engine import Engine

_PAGE = 4096  # of states
_CHUNK = 2 << 20  # of tensors


def check_budget(engine: Engine, parameters: Sequence[torch.Tensor], split: bool, waiting: bool) -> None:
    """Raises BudgetError, with the least that would do, when an update could never fit.

    split: masters take 2 bytes instead of 4. waiting: gradients of all parameters are there at once.
    """
    sizes = [_sizes(parameter, split) for parameter in parameters if parameter.device.type == "cpu"]
    if not sizes:
        return
    least = _least(sizes, "weights" in engine._fixed, "states" in engine._fixed, waiting)
    _C.trim_host_memory()
    stats = engine.stats()
    others = max(0, stats["host_used_bytes"] - stats["resident_bytes"])  # tensors that are no units
    if least + others <= stats["host_limit_bytes"]:
        return
    advice = "" if engine._has_nvme else ", or give nvme= so that states can leave memory"
    raise _C.BudgetError(
        f"host_memory is {text_of(stats['host_limit_bytes'])}, but training this model needs at least "
        f"{text_of(least)} for one update{f' beside {text_of(others)} of other tensors' if others else ''}: "
        f"raise it to {text_of(least + others)} or more{advice}"
    )


def moving_bytes(engine: Engine, parameter: torch.Tensor, split: bool, has_grad: bool = False) -> int:
    """What an update of it brings into memory beside what stays there. has_grad: its gradient is there."""
    weight, grad, states = _sizes(parameter, split)
    moving = 0 if "weights" in engine._fixed else weight + (0 if has_grad else grad)
    return moving if "states" in engine._fixed else moving + states


def new_bytes(parameters: Sequence[torch.Tensor], split: bool) -> int:
    """Of the states that their first update makes."""
    return sum(_sizes(parameter, split)[2] for parameter in parameters)


def text_of(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _sizes(parameter: torch.Tensor, split: bool) -> tuple[int, int, int]:
    """Bytes of weight, gradient and states in memory."""
    master = 0
    if parameter.dtype in NARROW:
        master = 2 if split and parameter.dtype == torch.bfloat16 else 4
    states = 2 * _rounded(4 * parameter.numel(), _PAGE) + _rounded(master * parameter.numel(), _PAGE)
    return _rounded(parameter.nbytes, _PAGE), _rounded(parameter.nbytes, _CHUNK), states


def _least(sizes: list[tuple[int, int, int]], weights_stay: bool, states_stay: bool, waiting: bool) -> int:
    """What stays in memory, and the rest of the update that needs most."""
    stay = [0, 0, 0]
    if weights_stay:
        stay[0] = sum(weight for weight, _, _ in sizes)
        stay[1] = sum(grad for _, grad, _ in sizes) if waiting else 0
    if states_stay:
        stay[2] = sum(states for _, _, states in sizes)
    moving = [index for index in range(3) if not stay[index]]
    return sum(stay) + max(sum(size[index] for index in moving) for size in sizes)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
