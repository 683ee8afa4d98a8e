"""Tensors where torch's files have them: mapped, whatever their strides, and never beyond the end of their file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.checkpoint.cover import cover_problems
from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.checkpoint.stored_tensor import FilePiece, StoredTensor
from tidemill.contracts.checkpoint import SavedTensor, TensorSpec
from tidemill.errors import CheckpointError

__all__ = ["Located", "joined", "located"]


@dataclass(frozen=True, kw_only=True)
class Located:
    """A piece of `shape` at `offset` of its tensor, in `path` from byte `begin`; `strides` are in elements."""

    path: Path
    dtype: str
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte behind its last element."""
        if math.prod(self.shape) == 0:
            return self.begin
        last = sum((side - 1) * stride for side, stride in zip(self.shape, self.strides, strict=True))
        return self.begin + (last + 1) * ITEM_BYTES[self.dtype]

    @property
    def row_major(self) -> bool:
        """Whether its elements lie one behind the other, in order."""
        step = 1
        for side, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if side > 1 and stride != step:
                return math.prod(self.shape) == 0
            step *= side
        return True


def located(told: Mapping[str, Any], path: Path, size: int, offset: Sequence[int] | None = None) -> Located:
    """A piece as the child told of it, in a file of `size` bytes. Raises CheckpointError when it cannot be true."""
    try:
        dtype, begin = told["dtype"], told["begin"]
        shape, strides = tuple(told["shape"]), tuple(told["strides"])
        numbers = (begin, *shape, *strides)
        whole = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        if not whole or dtype not in ITEM_BYTES or len(shape) != len(strides):
            raise ValueError("numbers")
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"cannot read {path}: it was described by something that is no tensor") from None
    at = (0,) * len(shape) if offset is None else tuple(offset)
    piece = Located(path=path, dtype=dtype, begin=begin, shape=shape, strides=strides, offset=at)
    if piece.end > size:
        raise CheckpointError(f"cannot read {path}: a tensor ends at byte {piece.end} of {size}; the file is cut short")
    return piece


def joined(name: str, pieces: Sequence[Located], shape: tuple[int, ...]) -> SavedTensor:
    """The whole tensor. Raises CheckpointError when the pieces do not make it, each element once."""
    specs = [
        (piece.path.name, {name: TensorSpec(dtype=piece.dtype, shape=piece.shape, whole=shape, offset=piece.offset)})
        for piece in pieces
    ]
    ranks = {len(shape)} | {len(piece.offset) for piece in pieces} | {len(piece.shape) for piece in pieces}
    problems = cover_problems(specs) if len(ranks) == 1 and pieces else [f"{name} has no pieces of its rank"]
    if problems:
        raise CheckpointError(f"cannot read {name}: {'; '.join(problems)}")
    if all(piece.row_major for piece in pieces):
        parts = tuple(
            FilePiece(path=piece.path, begin=piece.begin, end=piece.end, offset=piece.offset, shape=piece.shape)
            for piece in pieces
        )
        return StoredTensor(dtype=pieces[0].dtype, shape=shape, pieces=parts)
    return StridedTensor(dtype=pieces[0].dtype, shape=shape, pieces=tuple(pieces))


@dataclass(frozen=True, kw_only=True)
class StridedTensor:
    """A SavedTensor over pieces of which some are transposed: every read copies what it is asked for."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Located, ...]

    @property
    def data(self) -> memoryview:
        """See SavedTensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        """See SavedTensor."""
        if math.prod(shape) == 0:
            return memoryview(b"")
        out = np.empty(shape, dtype=f"V{ITEM_BYTES[self.dtype]}")
        for piece in self.pieces:
            low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, piece.offset, piece.shape, strict=True)]
            if any(top <= bottom for bottom, top in zip(low, high, strict=True)):
                continue
            out[_cut(low, high, offset)] = _view(piece)[_cut(low, high, piece.offset)]
        whole: memoryview = out.reshape(-1).view(np.uint8).data
        return whole


def _view(piece: Located) -> "np.ndarray[Any, Any]":
    item = ITEM_BYTES[piece.dtype]
    length = piece.end - piece.begin
    raw = np.memmap(piece.path, dtype=np.uint8, mode="r", offset=piece.begin, shape=(length,))
    strides = tuple(stride * item for stride in piece.strides)
    # numpy checks that shape and strides stay within the bytes.
    return np.ndarray(piece.shape, dtype=f"V{item}", buffer=raw, strides=strides)


def _cut(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
