"""torch.load, which would have everything in memory at once that it reads.

What would take much of host_memory becomes a file that is mapped: a copy on NVMe without a name, so the file
that is read may be written again.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch

from zinf import _C
from zinf._writers import write_all

_SHARE = 4  # of host_memory: the rest is for those who use what is loaded


class _Loading(threading.local):
    """What the torch.load of a thread may still read into memory, and where the rest goes."""

    room_bytes = 0
    folder: str | None = None


_loading = _Loading()


@functools.cache
def read_into_mapped_files(smallest_engine: Callable[[], tuple[int, str | None]]) -> None:
    """From the first engine on. smallest_engine: the host_memory, and a folder on NVMe where there is one."""
    torch.serialization._load = _counted(torch.serialization._load, smallest_engine)
    reader = torch._C.PyTorchFileReader
    reader.get_storage_from_record = _record_mapped(reader.get_storage_from_record)


def _counted(load: Any, smallest_engine: Callable[[], tuple[int, str | None]]) -> Any:
    @functools.wraps(load)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _loading.room_bytes, _loading.folder
        limit_bytes, _loading.folder = smallest_engine()
        _loading.room_bytes = limit_bytes // _SHARE
        try:
            return load(*args, **kwargs)
        finally:
            _loading.room_bytes, _loading.folder = before

    return call


def _record_mapped(get_storage_from_record: Any) -> Any:
    @functools.wraps(get_storage_from_record)
    def call(self: Any, name: str, size: int, *args: Any) -> Any:
        read = get_storage_from_record(self, name, size, *args)
        _loading.room_bytes -= size
        if size == 0 or _loading.folder is None or _loading.room_bytes >= 0:
            return read
        with (
            tempfile.TemporaryFile(dir=_loading.folder, buffering=0) as file,
            _C.Reading(read.untyped_storage()) as content,
        ):
            write_all(file, content)
            return torch.from_file(f"/proc/self/fd/{file.fileno()}", size=size, dtype=torch.uint8)

    return call
