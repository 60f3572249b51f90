"""Several ranks: the group that torchrun has made, and what all of them must have alike."""

from __future__ import annotations

import datetime
import io
import os
import sys
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zinf import _C
from zinf._random import random_states, set_random_states

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FOREVER = datetime.timedelta(days=365)  # a rank that ends is noticed by itself


def find_group(group: ProcessGroup | None) -> str | None:
    """The name of a new gloo group over the ranks of `group`; None where there is one rank.

    Under torchrun, with a script that has made no group, the default one is made here.
    """
    if not dist.is_available():
        return None
    if group is None and not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
            return None
        dist.init_process_group("gloo")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == 1:
        return None
    made = dist.new_group(
        ranks, backend="gloo", timeout=_FOREVER, use_local_synchronization=group is not None
    )
    return made.group_name


class SameRandom:
    """Inside it every rank draws what rank 0 draws.

    Afterwards a generator that had the state of rank 0's before goes on from there; any other has the state
    back that it had.
    """

    def __init__(self, manager: _C.Manager):
        self._manager = manager

    def __enter__(self) -> None:
        if self._manager.ranks is None:
            return
        self._own = random_states()
        self._first = _decode(_C.broadcast(self._manager, _encode(self._own)))
        set_random_states(self._first)

    def __exit__(self, *_: object) -> None:
        if self._manager.ranks is None:
            return
        now = random_states()
        kept = {
            name: now[name] if _same(self._own[name], self._first[name]) else own
            for name, own in self._own.items()
        }
        set_random_states(kept)


def share_model(manager: _C.Manager, model: torch.nn.Module) -> None:
    """Every rank has rank 0's parameters and buffers, as after DistributedDataParallel(model)."""
    if manager.ranks is None:
        return
    _C.share_tensors(manager, [*model.named_parameters(), *model.named_buffers()])


def ranks_of(parameters: Sequence[torch.Tensor]) -> list[_C.Ranks]:
    """Of the engines of these, where they have several."""
    managers = [manager for manager in _C.managers_of(parameters) if manager is not None]
    return [manager.ranks for manager in managers if manager.ranks is not None]


def slices_of(parameters: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """Which slices of these this rank keeps, in plain numbers; None where none of them is split."""
    split = [parameter for parameter in parameters if _C.is_split(parameter)]
    if not split:
        return None
    ranks = ranks_of(split)[0]
    return {
        "rank": ranks.rank,
        "ranks": ranks.size,
        "partition_group": ranks.num_slices,
        "slices": [_slice_of(parameter) for parameter in parameters],  # first, end and number of elements
    }


def check_slices(parameters: Sequence[torch.Tensor], saved: Sequence[int], given: dict[str, Any]) -> None:
    """Refuses a state_dict() with states of slices that this rank does not keep."""
    kept = given.get("ranks")
    own = slices_of(parameters)
    for position, index in enumerate(saved[: len(parameters)]):
        if given["state"].get(index) and _slice_in(kept, index) != _slice_in(own, position):
            raise ValueError(
                f"these optimizer states are of {_owner(kept)}, and this is {_owner(own)}: with several "
                "ranks state_dict() holds the slices that one rank keeps. Save with engine.save(path) on all "
                "ranks, and load with engine.load(path): that takes checkpoints of any number of ranks"
            )


def _slice_in(kept: dict[str, Any] | None, index: int) -> list[Any] | None:
    """What tells it from any other; None: the whole parameter."""
    if kept is None or kept["slices"][index] is None:
        return None
    return [kept["ranks"], kept["partition_group"], *kept["slices"][index]]


def _slice_of(parameter: torch.Tensor) -> list[int] | None:
    return [*_C.kept_range(parameter), parameter.numel()] if _C.is_split(parameter) else None


def _owner(kept: dict[str, Any] | None) -> str:
    if kept is None:
        return "one process"
    rank, ranks, group = kept["rank"], kept["ranks"], kept["partition_group"]
    return f"rank {rank} of {ranks}" + (f" with partition_group={group}" if group != ranks else "")


def short_hash(value: Any) -> str:
    """Of what has a repr(): texts that ranks compare are short."""
    return f"{zlib.crc32(repr(value).encode()):08x}"


def end_rank(ranks: _C.Ranks) -> None:
    """At the end of the process: others may need slices until they end too."""
    error = getattr(sys, "last_value", None)  # what nobody has caught
    if error is None:
        failure = ranks.finish()
    else:
        failure = ranks.failure()
        ranks.fail(f"{type(error).__name__}: {error}")
    if failure and failure not in str(error):  # the script has not heard of it
        print(f"zinf: {failure}", file=sys.stderr, flush=True)


def patience() -> float:
    """How many seconds save() and load() wait for ranks that do not call them.

    A little less than any collective of the default group waits: a rank may stand in one of those.
    """
    backends = [dist.group.WORLD._get_backend(device) for device in dist.group.WORLD._device_types]
    timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
    return 0.75 * min(timeouts, default=dist.default_pg_timeout).total_seconds()


def check_all_split(parameters: Sequence[torch.Tensor]) -> None:
    """Refuses what would be trained by each rank for itself."""
    for parameter in parameters:
        if not _C.is_split(parameter):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} is not split over the ranks, so they would "
                "train it each for itself: call engine.adopt(model) for what was not born in engine.init(); "
                "if that does not help, somebody else holds its memory (a view, a numpy array)"
            )


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return _plain(one) == _plain(other)


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
