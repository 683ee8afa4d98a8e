"""How a fake trainer's arrays lie: whole in this process, or cut into pieces that several ranks hold elsewhere."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tidemill.checkpoint.shard import LocalShard, write_shard
from tidemill.contracts.checkpoint import (
    Places,
    SavedTensor,
    Shard,
    Snapshot,
    TensorBytes,
    TensorSpec,
    WrittenFile,
)
from tidemill.errors import CheckpointError
from tidemill.testing.fakes.device import Array

__all__ = ["InShards", "Layout", "Whole"]


class Layout(Protocol):
    """What a trainer saves and loads by."""

    def snapshot(self, arrays: Mapping[str, Array], extra: Mapping[str, Any]) -> Snapshot:
        """Copies of `arrays`, as they lie."""
        ...

    def read(self, tensor: SavedTensor) -> Array:
        """The whole of it, read as it will lie."""
        ...


class Whole:
    """One process holds all."""

    def snapshot(self, arrays: Mapping[str, Array], extra: Mapping[str, Any]) -> Snapshot:
        """One tensor an array."""
        tensors = {
            name: TensorBytes(dtype="F64", shape=array.shape, data=memoryview(array.tobytes()))
            for name, array in arrays.items()
        }
        return Snapshot(tensors=tensors, extra=extra)

    def read(self, tensor: SavedTensor) -> Array:
        """At once."""
        return np.frombuffer(tensor.data, dtype=np.float64).reshape(tensor.shape).copy()


class InShards:
    """`count` ranks hold rows, as even as they come; with more ranks than rows some hold none."""

    def __init__(self, count: int) -> None:
        self.count = count

    def snapshot(self, arrays: Mapping[str, Array], extra: Mapping[str, Any]) -> Snapshot:
        """One shard a rank; after `release` none can be written."""
        shards = [_Elsewhere(self._pieces(arrays, rank)) for rank in range(self.count)]

        def release() -> None:
            for shard in shards:
                shard.held = False

        return Snapshot(shards=shards, extra={**extra, "ranks": self.count}, release=release)

    def read(self, tensor: SavedTensor) -> Array:
        """Each rank its own rows."""
        rows, width = tensor.shape[0], tensor.shape[1:]
        boxes = [self._rows(rows, rank) for rank in range(self.count)]
        read = [tensor.read((first, *(0 for _ in width)), (end - first, *width)) for first, end in boxes]
        return np.frombuffer(b"".join(read), dtype=np.float64).reshape(tensor.shape).copy()

    def _rows(self, rows: int, rank: int) -> tuple[int, int]:
        return rows * rank // self.count, rows * (rank + 1) // self.count

    def _pieces(self, arrays: Mapping[str, Array], rank: int) -> dict[str, TensorBytes]:
        pieces = {}
        for name, array in arrays.items():
            first, end = self._rows(len(array), rank)
            data, offset = array[first:end], (first, *(0 for _ in array.shape[1:]))
            pieces[name] = TensorBytes(
                dtype="F64", shape=data.shape, data=memoryview(data.tobytes()), whole=array.shape, offset=offset
            )
        return pieces


class _Elsewhere:
    """A Shard that lets nobody see its bytes."""

    def __init__(self, pieces: Mapping[str, TensorBytes]) -> None:
        self._pieces = pieces
        self.held = True

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See Shard."""
        return {name: piece.spec for name, piece in self._pieces.items()}

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        """See Shard."""
        if not self.held:
            raise CheckpointError(f"cannot write {path}: its snapshot was released")
        return write_shard(path, self._pieces, advance)

    def some(self, names: Collection[str]) -> Shard:
        """See Shard."""
        return LocalShard(self._pieces).some(names)

    def place(self, places: Places, advance: Callable[[int], None], *, last: bool = False) -> int:
        """See Placer."""
        return LocalShard(self._pieces).place(places, advance)

    def differing(self, places: Places, advance: Callable[[int], None]) -> str:
        """See Placer."""
        return LocalShard(self._pieces).differing(places, advance)
