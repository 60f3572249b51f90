"""Addresses of managed tensors: what Python tells about them, and how long content stays there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from zinf import _C


@functools.cache
def tell_own() -> None:
    """`data_ptr()` of a managed tensor or storage gives its own address, which stays the same, and does not
    bring the content into memory: that comes when the address is used. Arrays and dlpack capsules hold a
    tensor of their own: the content stays in memory while that lives, whatever else holds the storage."""
    for owner, address_of in (
        (torch.Tensor, _C.address_of_tensor),
        (torch.UntypedStorage, _C.address_of_storage),
    ):
        owner.data_ptr = _told(owner.data_ptr, address_of)
    torch.Tensor.numpy = _held(torch.Tensor.numpy)
    torch.Tensor.__dlpack__ = _held(torch.Tensor.__dlpack__)


def _told(method: Any, address_of: Callable[[Any], int | None]) -> Any:
    @functools.wraps(method)
    def data_ptr(self: Any) -> int:
        address = address_of(self)
        return method(self) if address is None else address

    return data_ptr


def _held(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # One that requires a gradient is refused, unless `force` detaches it.
        if not _C.is_managed(self) or (self.requires_grad and not kwargs.get("force")):
            return method(self, *args, **kwargs)
        taker = self.detach()
        _C.hold_content_for(taker)
        taken = method(taker, *args, **kwargs)
        base = getattr(taken, "base", None)  # an array makes a tensor of its own
        if isinstance(base, torch.Tensor):
            _C.hold_content_for(base)
        return taken

    return call
