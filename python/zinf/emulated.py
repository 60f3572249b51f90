"""An emulated accelerator, for tests: the device "emu".

It is no fast device, and no model of one: kernels are the CPU's and give the CPU's bits, and every call
is over when it returns. What it has of a real one is memory of its own, bounded, which the host cannot
read: touching it crashes, and freed memory turns into NaNs. So code that passes on it does not take device
memory for host memory.

    zinf.emulated.enable(memory_bytes=1 << 30)
    model.to("emu")

After enable(), this module is also torch.emu.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
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
    # backward() returns a moment before autograd's thread lets go of the graph. Should the interpreter be
    # ending by then, torch aborts (on every device); so the thread gets its moment.
    atexit.register(time.sleep, 0.05)


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
    """Everything is done already."""


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
