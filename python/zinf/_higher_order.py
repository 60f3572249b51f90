"""Torch's higher-order operators (cond, scan, flex_attention, ...) with managed arguments."""

from __future__ import annotations

import functools

import torch
import torch._ops

from zinf import _C


@functools.cache
def pass_over_keys() -> None:
    """Makes every higher-order operator, existing or later, dispatch past zinf's keys.

    A higher-order operator has a Python kernel per dispatch key, and none for zinf's keys. It needs none: the
    ordinary operators that it calls are intercepted one by one.
    """
    keys = [torch._C._dispatch_key_parse(name) for name in _C.dispatch_keys()]
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.extend(keys)
    for operator in torch._ops._higher_order_ops.values():
        for key in keys:
            operator.fallthrough(key)
