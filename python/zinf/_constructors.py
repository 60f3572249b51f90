"""Old constructors of torch that do not know zinf's dispatch keys."""

from __future__ import annotations

import functools
from typing import Any

import torch

from zinf import _C


@functools.cache
def accept_managed() -> None:
    """`p.new_tensor(...)` and `p.new(...)` take their type and device from the keys of `p`, and refuse keys
    that are no device's: for a tensor with ours, an empty one like it is asked instead."""
    for name in ("new_tensor", "new"):
        setattr(torch.Tensor, name, _wrap(getattr(torch.Tensor, name)))


def _wrap(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.has_keys(self):
            self = _C.without_keys(self)
        return method(self, *args, **kwargs)

    return call
