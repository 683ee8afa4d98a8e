"""Weights on their way to another process: many tensors in one flat buffer, and a list of what lies where."""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from tidemill.weights.copying import copy_weight
from tidemill.weights.elements import torch_dtype

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from torch import Tensor

__all__ = ["ALIGNMENT", "Entry", "Parcel", "aligned", "host_bytes", "pack", "unpack", "write"]

# Where an allocator would put a tensor of its own: vectorised loads and casts rely on it.
ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One weight in a buffer: `dtype` as in `float32`; `start` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Parcel:
    """Some whole weights, the `number`th that were sent together.

    `payload` is their buffer: flat uint8 in host memory, or what opens it where it lies.
    """

    entries: tuple[Entry, ...]
    payload: Any
    number: int = 0

    def digest(self) -> int:
        """64 bits of its number and of names, dtypes, shapes and places in order: of what it says that it brings."""
        return xxhash.xxh3_64_intdigest(repr((self.number, self.entries)).encode())


def aligned(size: int) -> int:
    """`size` rounded up to where the next weight may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write(flat: "Tensor", entry: Entry, tensor: "Tensor") -> "Tensor":
    """Cast `tensor` into its place in `flat`; what lies there then, as a view."""
    view = _view(flat, entry)
    copy_weight(view, tensor)
    return view


def pack(weights: "Sequence[tuple[str, Tensor]]", dtype: str) -> Parcel:
    """Cast `weights` into one new buffer in host memory."""
    entries: list[Entry] = []
    end = 0
    for name, tensor in weights:
        entries.append(Entry(name=name, dtype=dtype, shape=tuple(tensor.shape), start=aligned(end)))
        end = entries[-1].start + entries[-1].nbytes
    array = np.empty(end, dtype=np.uint8)
    flat = host_bytes(array)
    for entry, (_, tensor) in zip(entries, weights, strict=True):
        write(flat, entry, tensor)
    return Parcel(entries=tuple(entries), payload=array)


def unpack(entries: tuple[Entry, ...], flat: "Tensor") -> "Iterator[tuple[str, Tensor]]":
    """Each weight by name, as a view of `flat`."""
    for entry in entries:
        yield entry.name, _view(flat, entry)


def host_bytes(array: "UInt8[np.ndarray, ' n']") -> "Tensor":
    """A tensor over the array's memory, which the caller keeps alive and which may be read-only: do not write to it."""
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # By address: PyTorch warns of every read-only array, and shared memory is read-only for those who receive it.
    return torch.frombuffer((ctypes.c_char * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)


def _view(flat: "Tensor", entry: Entry) -> "Tensor":
    return flat[entry.start : entry.start + entry.nbytes].view(torch_dtype(entry.dtype)).view(entry.shape)
