"""Keeps the handler of SIGSEGV that serves reads through const pointers before Python's own handlers."""

from __future__ import annotations

import _signal
import faulthandler
import functools
import signal
from collections.abc import Callable
from typing import Any

from zinf import _C


@functools.cache
def stay_first() -> None:
    """Wraps what installs handlers of SIGSEGV in Python: they become the next in line after zinf's."""
    faulthandler.enable = _behind_ours(faulthandler.enable)
    faulthandler.disable = _behind_ours(faulthandler.disable)
    # The module `signal` looks this one up at every call.
    _signal.signal = _behind_ours(_signal.signal, only_for=signal.SIGSEGV)


def _behind_ours(function: Callable[..., Any], only_for: int | None = None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if only_for is not None and args[:1] != (only_for,):
            return function(*args, **kwargs)
        _C.remove_fault_handler()
        try:
            return function(*args, **kwargs)
        finally:
            _C.install_fault_handler()

    return call
