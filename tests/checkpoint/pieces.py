"""Tensors cut into pieces, for tests: random grids, and shards of them."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tidemill.checkpoint.manifest import MANIFEST, Manifest
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.shard import LocalShard
from tidemill.contracts.checkpoint import TensorBytes

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
DTYPES = {"F32": np.float32, "I64": np.int64, "U8": np.uint8, "F16": np.float16}


def counted(shape: tuple[int, ...], dtype: str = "F32") -> Array:
    """An array whose elements all differ, as far as its dtype allows."""
    return np.arange(math.prod(shape)).astype(DTYPES[dtype]).reshape(shape)


def piece(array: Array, offset: Sequence[int], shape: Sequence[int], dtype: str = "F32") -> TensorBytes:
    """The box of `array` as a rank's piece."""
    box = array[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    data = memoryview(box.tobytes())
    return TensorBytes(dtype=dtype, shape=box.shape, data=data, whole=array.shape, offset=tuple(offset))


def in_rows(array: Array, ranks: int) -> list[TensorBytes]:
    """Dealt as FSDP2 does: equal chunks of rows, rounded up, so that the last ranks may have fewer or none."""
    chunk = -(-len(array) // ranks)
    bounds = [(min(rank * chunk, len(array)), min((rank + 1) * chunk, len(array))) for rank in range(ranks)]
    rest = array.shape[1:]
    return [piece(array, (first, *(0 for _ in rest)), (end - first, *rest)) for first, end in bounds]


def sums_of_pieces(checkpoint: Path) -> dict[str, str]:
    """Checksum of each piece in a checkpoint's files, by the name of its tensor and where it lies in that."""
    found: dict[str, str] = {}
    for entry in Manifest.read(checkpoint / MANIFEST).files:
        data = (checkpoint / entry.name).read_bytes()
        sums = {f"{one.name} at {list(one.offset)}": checksum(data[one.begin : one.end]) for one in entry.slices}
        assert not found.keys() & sums.keys()
        found |= sums
    return found


def shards_of(arrays: dict[str, Array], ranks: int) -> list[LocalShard]:
    """A shard a rank, cut by rows."""
    cut = {name: in_rows(array, ranks) for name, array in arrays.items()}
    return [LocalShard({name: pieces[rank] for name, pieces in cut.items()}) for rank in range(ranks)]


@st.composite
def grids(draw: st.DrawFn) -> tuple[Array, str, list[TensorBytes]]:
    """An array of 0 to 4 dimensions, its dtype, and its pieces by a random grid, in random order."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    array = counted(shape, dtype)
    cells: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for side in shape:
        cuts = sorted({0, side, *draw(st.lists(st.integers(0, side), max_size=3))})
        spans = list(itertools.pairwise(cuts)) or [(0, 0)]
        cells = [((*at, low), (*size, high - low)) for at, size in cells for low, high in spans]
    pieces = [piece(array, at, size, dtype) for at, size in cells]
    return array, dtype, list(draw(st.permutations(pieces)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a box inside `shape`, which may be empty."""
    bounds = [sorted(draw(st.tuples(st.integers(0, side), st.integers(0, side)))) for side in shape]
    return tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)


def cut(array: Array, offset: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    """The naive twin of a read."""
    return array[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))].tobytes()
