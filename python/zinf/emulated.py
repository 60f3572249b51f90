"""An emulated accelerator, for tests: the device "emu".

It is no fast device: kernels are the CPU's and give the CPU's bits. What it has of a real one:

- memory of its own, bounded, which the host cannot read: touching it crashes, and freed memory turns into
  NaNs. So code that passes on it does not take device memory for host memory;
- streams: calls return before the work is done, threads do it in each stream's order, and nothing but
  events orders streams. So code that passes on it waits where it must, whatever the delays.

    zinf.emulated.enable(memory_bytes=1 << 30)
    model.to("emu")
    zinf.emulated.set_pace(max_delay=1e-3, seed=7)  # everything starts late, by up to a millisecond

The first call of an operator with new shapes still runs at once: that shows what it returns. So do
operators that draw random numbers or whose shapes depend on data.

After enable(), this module is also torch.emu.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import types
from collections.abc import Iterator

import torch

_memory_bytes: int | None = None
_pid: int | None = None


def enable(memory_bytes: int = 1 << 30) -> None:
    """Registers the device with torch: once per process, and before its first backward pass (autograd
    starts its threads there, one per device)."""
    global _memory_bytes, _pid
    if _memory_bytes is not None:
        if memory_bytes != _memory_bytes:
            has, wanted = (f"{bytes / 2**20:.1f} MiB" for bytes in (_memory_bytes, memory_bytes))
            raise RuntimeError(f"emu already has {has}, it cannot get {wanted}")
        return
    from torch.utils import backend_registration

    from zinf import _emulated

    backend_registration.rename_privateuse1_backend("emu")
    _emulated.start(memory_bytes)
    torch._register_device_module("emu", sys.modules[__name__])  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _memory_bytes, _pid = memory_bytes, os.getpid()
    atexit.register(_finish)


def _finish() -> None:
    # backward() returns a moment before autograd's thread lets go of the graph. Should the interpreter be
    # ending by then, torch aborts (on every device); so the thread gets its moment.
    time.sleep(0.05)
    if not _is_in_bad_fork():
        _emulated().wait()


def _emulated() -> types.ModuleType:
    from zinf import _emulated

    return _emulated


def set_pace(
    max_delay: float = 0.0, seed: int = 0, to_device: float = 0.0, to_host: float = 0.0, flops: float = 0.0
) -> None:
    """How slow the device is; results do not depend on it.

    max_delay: every task starts late by up to so many seconds, at random, as the seed says.
    to_device, to_host: bytes per second of copies. flops: of products of matrices, per second. 0: no limit.
    """
    _emulated().set_pace(max_delay=max_delay, seed=seed, to_device=to_device, to_host=to_host, flops=flops)


def trace(on: bool) -> list[list[tuple[str, int, int]]]:
    """From now on streams note what they do, or no longer; returns what they noted: per stream, the default
    one first, name, begin and end in nanoseconds."""
    spans: list[list[tuple[str, int, int]]] = _emulated().trace(on)
    return spans


def pinned_bytes() -> tuple[int, int]:
    """Pinned host memory in use now, and at most."""
    used: tuple[int, int] = _emulated().pinned_bytes()
    return used


def reset_pinned_peak() -> None:
    _emulated().reset_pinned_peak()


# What torch looks for in the module of a device.


def is_available() -> bool:
    return _memory_bytes is not None


def is_initialized() -> bool:
    return is_available() and not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return _pid is not None and _pid != os.getpid()


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: torch.types.Device) -> None:
    torch.accelerator.set_device_index(device)


@contextlib.contextmanager
def device(device: torch.types.Device) -> Iterator[None]:
    """There is only one, so nothing changes."""
    yield


def synchronize(device: torch.types.Device = None) -> None:
    torch.accelerator.synchronize()


def current_stream(device: torch.types.Device = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def empty_cache() -> None:
    """Nothing is cached."""


def memory_allocated(device: torch.types.Device = None) -> int:
    return torch.accelerator.memory_allocated()


def max_memory_allocated(device: torch.types.Device = None) -> int:
    return torch.accelerator.max_memory_allocated()


def reset_peak_memory_stats(device: torch.types.Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats()


def mem_get_info(device: torch.types.Device = None) -> tuple[int, int]:
    """Free and total bytes."""
    return torch.accelerator.get_memory_info()


# Random numbers are the CPU's: torch.manual_seed() has set its generator when it comes here.


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: torch.types.Device = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: torch.types.Device = None) -> None:
    torch.default_generator.set_state(state)
