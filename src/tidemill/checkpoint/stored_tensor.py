"""Tensors as they lie in a checkpoint's files: mapped when they are read, joined where they are in pieces.

One of them can be sent to another process, which sees the same files: what is sent is where the pieces lie. A read
takes host memory for the box that is asked for and no more, and none where the box is one stretch of one piece.
"""

import math
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.contracts.checkpoint import read_box
from tidemill.errors import CheckpointError

__all__ = ["FilePiece", "StoredTensor", "is_one_stretch"]

_Box = tuple[tuple[int, ...], tuple[int, ...]]


class FilePiece(NamedTuple):
    """A piece of `shape` at `offset` in its tensor; bytes `[begin, end)` of the file `path`."""

    path: Path
    begin: int
    end: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def mapped(self) -> memoryview:
        """Its bytes, read-only. Raises CheckpointError when they cannot be had here."""
        try:
            view = memoryview(_mapped(self.path))
        except (OSError, ValueError) as error:
            raise self._changed(str(error)) from error
        if len(view) < self.end:
            raise self._changed(f"it has {len(view)} bytes")
        return view[self.begin : self.end]

    def _changed(self, how: str) -> CheckpointError:
        return CheckpointError(
            f"cannot read {self.path}, which was whole when it was verified: {how}; leave checkpoints alone while a "
            "run reads them, and keep run.dir on a file system that every host of the run shares"
        )

    def shared_with(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> _Box | None:
        """The box that it has in common with the box of `shape` at `offset`; None when that has no element."""
        low = tuple(max(a, b) for a, b in zip(self.offset, offset, strict=True))
        high = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, offset, shape, strict=True))
        size = tuple(top - bottom for bottom, top in zip(low, high, strict=True))
        return (low, size) if all(side > 0 for side in size) else None


class StoredTensor(NamedTuple):
    """A SavedTensor over the pieces of files that were verified: they cover it exactly."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[FilePiece, ...]

    @property
    def data(self) -> memoryview:
        """See SavedTensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        """See SavedTensor. Raises CheckpointError for a box that is not inside, or when a file cannot be read here."""
        if shape == self.shape and len(self.pieces) == 1 and not any(offset) and self.pieces[0].shape == shape:
            return self.pieces[0].mapped() if 0 not in shape else memoryview(b"")
        self._check_inside(offset, shape)
        if math.prod(shape) == 0:
            return memoryview(b"")
        shares = [(piece, box) for piece in self.pieces if (box := piece.shared_with(offset, shape)) is not None]
        if len(shares) == 1 and is_one_stretch(shares[0][0].shape, shape):
            piece = shares[0][0]
            return read_box(piece.mapped(), piece.shape, _minus(offset, piece.offset), shape)
        item = ITEM_BYTES[self.dtype]
        joined = np.empty((*shape, item), dtype=np.uint8)
        for piece, (low, size) in shares:
            source = np.frombuffer(piece.mapped(), dtype=np.uint8).reshape(*piece.shape, item)
            joined[_cut(_minus(low, offset), size)] = source[_cut(_minus(low, piece.offset), size)]
        whole: memoryview = joined.reshape(-1).data
        return whole

    def _check_inside(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        fits = len(offset) == len(shape) == len(self.shape)
        if not fits or any(a < 0 or n < 0 or a + n > m for a, n, m in zip(offset, shape, self.shape, strict=True)):
            raise CheckpointError(
                f"cannot read the box of shape {list(shape)} at {list(offset)} of a tensor of shape {list(self.shape)}"
            )


# A mapping holds a file handle, of which a process has few: the tensors of a file share one while any is in use.
_maps: "weakref.WeakValueDictionary[tuple[int, int], mmap.mmap]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _mapped(path: Path) -> mmap.mmap:
    # By number, not by name: another file may have the name by now, and a mapped file keeps its number.
    stat = path.stat()
    with _lock:
        found = _maps.get((stat.st_dev, stat.st_ino))
    if found is not None and len(found) == stat.st_size:
        return found
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        key = (stat.st_dev, stat.st_ino)
        with _lock:
            found = _maps.get(key)
            if found is None or len(found) != stat.st_size:
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _maps[key] = found
            return found


def is_one_stretch(held: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box of `shape` in a row-major tensor of shape `held` lies without a gap."""
    inner = len(shape)
    while inner > 0 and shape[inner - 1] == held[inner - 1]:
        inner -= 1
    return math.prod(shape[: max(inner - 1, 0)]) == 1


def _minus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _cut(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
