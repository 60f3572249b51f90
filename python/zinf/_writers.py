"""torch.save and safetensors, which would have everything in memory at once that they write.

A storage is pinned while its bytes are written, as it is for an operator that reads it.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO

import torch

from zinf import _C

# They compare addresses, to find tensors that share memory, and read nothing through them.
_COMPARING = {
    "huggingface_hub.serialization._torch",
    "safetensors.torch",
    "torch.serialization",
    "transformers.modeling_utils",
}


@functools.cache
def write_piece_by_piece() -> None:
    """From the first engine on: what torch.save and safetensors have written may leave memory again."""
    torch.Tensor.data_ptr = _compared(torch.Tensor.data_ptr, _place)
    torch.UntypedStorage.data_ptr = _compared(torch.UntypedStorage.data_ptr, lambda storage: storage._cdata)
    torch.UntypedStorage.cpu = _pinned(torch.UntypedStorage.cpu)
    torch.UntypedStorage._write_file = _pinned(torch.UntypedStorage._write_file)
    writer = torch._C.PyTorchFileWriter
    writer.write_record = _record_pinned(writer.write_record)
    if importlib.util.find_spec("safetensors") is not None:
        _stream_safetensors()


def _compared(data_ptr: Callable[[Any], int], place: Callable[[Any], int]) -> Callable[[Any], int]:
    """data_ptr(), which brings content into memory, except for callers that only compare addresses."""

    @functools.wraps(data_ptr)
    def call(self: Any) -> int:
        if _is_managed(self) and sys._getframe(1).f_globals.get("__name__") in _COMPARING:
            return place(self)
        return data_ptr(self)

    return call


def _place(tensor: torch.Tensor) -> int:
    """Stands for the address of a managed tensor: it tells tensors of one storage apart."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def _is_managed(value: Any) -> bool:
    return _C.is_managed(value) if isinstance(value, torch.Tensor) else _C.is_managed_storage(value)


def _reading(storage: Any) -> Any:
    """For a `with` block that reads through the storage's address."""
    managed = isinstance(storage, torch.UntypedStorage) and _C.is_managed_storage(storage)
    return _C.Reading(storage) if managed else nullcontext()


def _pinned(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        with _reading(self):
            return method(self, *args, **kwargs)

    return call


def _record_pinned(write_record: Any) -> Any:
    @functools.wraps(write_record)
    def call(self: Any, name: str, data: Any, *args: Any, **kwargs: Any) -> Any:
        with _reading(data):
            return write_record(self, name, data, *args, **kwargs)

    return call


class _Tensors(dict[str, torch.Tensor]):
    """What safetensors.torch gives to its writers when managed tensors are among it."""


def _stream_safetensors() -> None:
    """Replaces what save_file(), save_model() and save() call: other modules have imported these by name."""
    import safetensors
    import safetensors.torch as module

    names = ("_flatten_as_ptr", "serialize_file", "serialize")
    if not all(hasattr(module, name) for name in names):
        return  # another version: all that it writes is in memory at once
    flatten, serialize_file, serialize = (getattr(module, name) for name in names)

    def flatten_or_keep(tensors: Any, keep_alive: list[Any]) -> Any:
        managed = isinstance(tensors, dict) and any(
            isinstance(tensor, torch.Tensor) and _C.is_managed(tensor) for tensor in tensors.values()
        )
        if not managed:
            return flatten(tensors, keep_alive)
        module._evaluate_tensors_for_save(tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                flatten({name: torch.empty(2, 2).t()}, [])  # raises what it raises for such a tensor
        return _Tensors(tensors)

    def write_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if not isinstance(tensors, _Tensors):
            return serialize_file(tensors, filename, metadata=metadata)
        header = _header(tensors, metadata)
        try:
            with _whole_file(filename) as file:
                _write(header, tensors, file)
        except OSError as error:
            raise safetensors.SafetensorError(f"Error while serializing: I/O error: {error}") from error

    def to_bytes(tensors: Any, metadata: Any = None) -> Any:
        if not isinstance(tensors, _Tensors):
            return serialize(tensors, metadata=metadata)
        file = io.BytesIO()
        _write(_header(tensors, metadata), tensors, file)
        return file.getvalue()

    module._flatten_as_ptr, module.serialize_file, module.serialize = flatten_or_keep, write_file, to_bytes


@contextmanager
def _whole_file(filename: Any) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole, as safetensors' own; nothing of it stays otherwise."""
    path = os.path.abspath(os.fsdecode(filename))
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "wb", buffering=0) as pipe_or_device:
            yield pipe_or_device
        return
    descriptor, unfinished = tempfile.mkstemp(prefix=".tmp", dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb", buffering=0) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def _header(tensors: dict[str, torch.Tensor], metadata: Any) -> dict[str, Any]:
    """As safetensors makes it: of tensors without elements, which then get their shapes and places."""
    import safetensors

    anywhere = torch.empty(1)  # it reads nothing there
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(tensor.dtype).split(".")[-1],
            shape=[0, *tensor.shape],
            data_ptr=anywhere.data_ptr(),
            data_len=0,
        )
        for name, tensor in tensors.items()
    }
    content = bytes(safetensors.serialize(specs, metadata=metadata))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = end, end + tensors[name].nbytes
            entry.update(shape=entry["shape"][1:], data_offsets=[begin, end])
    return header


def _write(header: dict[str, Any], tensors: dict[str, torch.Tensor], file: BinaryIO) -> None:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
    for name in header:
        if name != "__metadata__":
            _write_tensor(tensors[name], file)


def _write_tensor(tensor: torch.Tensor, file: BinaryIO) -> None:
    if tensor.numel() == 0:
        return
    tensor = tensor.detach().cpu()
    begin = tensor.storage_offset() * tensor.element_size()
    with _C.Reading(tensor.untyped_storage()) as content:
        write_all(file, content[begin : begin + tensor.nbytes])


def write_all(file: BinaryIO, content: memoryview) -> None:
    """A file without a buffer may take less than it is given."""
    while content:
        content = content[file.write(content) :]
