"""What one process, or several ranks, have saved: read by any number of ranks.

A checkpoint of one process is a store; one of several ranks is a directory with a store per rank, which has
the slices that the rank kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch

from zinf import _C

_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")


def folder_name(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}"


def folders_in(path: str) -> list[str]:
    """Of the ranks that have saved here, in their order; all of them, or none."""
    inside = sorted(os.listdir(path)) if os.path.isdir(path) else []
    found = [name for name in inside if _FOLDER.fullmatch(name)]
    if not found:
        return []
    ranks = int(_FOLDER.fullmatch(found[0])[2])  # type: ignore[index]
    wanted = [folder_name(rank, ranks) for rank in range(ranks)]
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(f"load: {path} is no whole checkpoint: it has no {missing[0]}")
    return [os.path.join(path, name) for name in wanted]


class Parts:
    """The stores of a checkpoint, and the meta data of the rank whose this one takes over."""

    def __init__(self, path: str, folders: list[str], rank: int, decode: Callable[[bytes], Any]):
        self.path = path
        self._readers = [_C.TensorReader(folder) for folder in folders or [path]]
        self.whole = not folders
        own = self._readers[rank % len(self._readers)]
        self._own = own
        self.data = own.extra()
        self.meta = decode(self.data) if self.data else None
        self.step = self._readers[0].step
        self._keepers = self._readers[: self.meta.get("slices")] if self.meta else []
        if any(reader.step != self.step for reader in self._readers):
            raise ValueError(f"load: {path} is no whole checkpoint: its ranks have saved other steps")

    def check(self, name: str, key: str, whole: torch.Tensor) -> None:
        """Raises unless there is a state of that name, with the type and shape of `whole`."""
        if self.whole:
            self._readers[0].check(name, key, whole)
            return
        shape, stride = self.meta["layouts"].get(name, (None, None))
        if shape is not None and list(shape) != list(whole.shape):
            raise ValueError(
                f"{self.path} has {name} with shape {tuple(shape)}, the model has it as {tuple(whole.shape)}"
            )
        if stride is not None and key == "weight" and list(stride) != list(whole.stride()):
            raise ValueError(
                f"{self.path} has {name} with strides {tuple(stride)}, the model has {whole.stride()}: "
                "slices of ranks are loaded into the same memory format only"
            )
        for reader, begin, end in self._slices(whole.numel()):
            reader.check(name, key, torch.empty(end - begin, dtype=whole.dtype, device="meta"))

    def check_buffer(self, name: str, buffer: torch.Tensor) -> None:
        """Buffers are whole on every rank; empty ones are not stored by ranks."""
        if self.whole or buffer.numel() > 0:
            self._own.check(name, "buffer", buffer)

    def read_buffer(self, name: str, buffer: torch.Tensor) -> None:
        if self.whole or buffer.numel() > 0:
            self._own.read(name, "buffer", buffer)

    def read(self, name: str, key: str, whole: torch.Tensor, kept: torch.Tensor) -> None:
        """Into what is kept of `whole`: itself, or this rank's slice of it."""
        if self.whole and kept is whole:
            self._readers[0].read(name, key, whole)
            return
        begin, end = 0, whole.numel()
        if kept is not whole:
            begin, end = _C.kept_range(whole)
        if begin == end:
            return
        slices = self._slices(whole.numel())
        for reader, first, last in slices:
            if (first, last) == (begin, end) and kept is not whole and not self.whole:
                reader.read(name, key, kept)  # replaces it, also where it could not be read
                return
        with torch.no_grad():
            self._flat(kept).copy_(self._joined(name, key, kept.dtype, whole, begin, end))

    def _joined(
        self, name: str, key: str, dtype: torch.dtype, whole: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        joined = torch.empty(end - begin, dtype=dtype)
        for reader, first, last in self._slices(whole.numel()):
            low, high = max(first, begin), min(last, end)
            if low >= high:
                continue
            shape = whole.shape if self.whole else (last - first,)
            part = torch.empty(shape, dtype=dtype)
            reader.read(name, key, part)
            if self.whole:
                part = self._flat(torch.empty_like(whole, dtype=dtype, device="cpu").copy_(part))
            joined[low - begin : high - begin] = part[low - first : high - first]
        return joined

    def _slices(self, elements: int) -> list[tuple[_C.TensorReader, int, int]]:
        count = len(self._keepers)
        ranges = [_C.slice_range(elements, count, rank) for rank in range(count)]
        return [
            (reader, *span) for reader, span in zip(self._keepers, ranges, strict=True) if span[0] < span[1]
        ]

    @staticmethod
    def _flat(tensor: torch.Tensor) -> torch.Tensor:
        """In the order of memory."""
        return tensor.detach().as_strided((tensor.numel(),), (1,))
