"""Pieces of tensors written into the middle of files, where the whole tensors lie: an export without a gather.

A piece that is cut along its first dimension is one run of bytes in the file; cut along another, it is a run for each
row, with other ranks' bytes between. Each run is one system call, some microseconds beside what its bytes take: 7 KiB
runs of a matrix cut into four go at the speed of large ones, runs of 64 bytes at a hundredth of it. Small runs that
follow each other without a gap (small tensors, mostly) are gathered first. A block is read, cast and written at a time,
so that host memory beyond what is given is two blocks.
"""

import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tidemill.checkpoint.durable import sync
from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.contracts.checkpoint import Places, SavedTensor, TensorPlace, TensorSpec, stretches
from tidemill.faults import point

__all__ = ["Pieces", "first_difference", "place_pieces"]

Pieces = Mapping[str, tuple[TensorSpec, SavedTensor]]
"""By a tensor's name which piece of it is there, and its bytes."""

_BLOCK = 16 << 20
_SMALL = 256 << 10  # runs below this are gathered
_GATHERED = 4 << 20  # bytes gathered at most


def _nobody(name: str) -> None:
    """Nobody wants to know."""


def place_pieces(
    pieces: Pieces,
    places: Places,
    advance: Callable[[int], None],
    *,
    written: Callable[[str], None] = _nobody,
) -> int:
    """Write each piece to its place, in files that are there, and fsync them; how many bytes were written.

    `advance` is told of bytes written and may raise to stop; `written` of each tensor that is read no more. Raises
    OSError.
    """
    total = 0
    left = {name: len(places[name]) for name in places.keys() & pieces.keys()}
    for path, found in _by_file(pieces, places):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            runs = _Runs(descriptor, advance)
            for name, place in found:
                for at, data in _runs(*pieces[name], place):
                    runs.put(at, data)
                left[name] -= 1
                if not left[name]:
                    written(name)
            runs.flush()
            total += runs.written
            sync(descriptor, fault="export.fsync-file")
        finally:
            os.close(descriptor)
    return total


def first_difference(pieces: Pieces, places: Places, advance: Callable[[int], None]) -> str:
    """The first tensor of which a file holds something else than `place_pieces` would write; "" when there is none.

    `advance` is told of bytes compared and may raise to stop. Raises OSError.
    """
    for path, found in _by_file(pieces, places):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for name, place in found:
                for at, data in _runs(*pieces[name], place):
                    if os.pread(descriptor, len(data), at) != data:
                        return name
                    advance(len(data))
        finally:
            os.close(descriptor)
    return ""


def _by_file(pieces: Pieces, places: Places) -> Iterator[tuple[Path, list[tuple[str, TensorPlace]]]]:
    """Files with the boxes in them of tensors that have a piece here, in the order in which they lie there."""
    found = [(name, place) for name in places.keys() & pieces.keys() for place in places[name]]
    found.sort(key=lambda item: (item[1].path, item[1].begin))
    for path, boxes in itertools.groupby(found, key=lambda item: item[1].path):
        yield path, list(boxes)


class _Runs:
    """Runs of bytes on their way into a file."""

    def __init__(self, descriptor: int, advance: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._advance = advance
        self._gathered = bytearray()
        self._at = 0
        self.written = 0

    def put(self, at: int, data: memoryview) -> None:
        if at != self._at + len(self._gathered) or len(self._gathered) + len(data) > _GATHERED:
            self.flush()
        if len(data) >= _SMALL:
            self.flush()
            self._write(at, data)
            return
        if not self._gathered:
            self._at = at
        self._gathered += data

    def flush(self) -> None:
        if self._gathered:
            self._write(self._at, memoryview(self._gathered))
            self._gathered = bytearray()

    def _write(self, at: int, data: memoryview) -> None:
        point("export.write")
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], at + done)
        self.written += done
        self._advance(done)


def _runs(spec: TensorSpec, tensor: SavedTensor, place: TensorPlace) -> Iterator[tuple[int, memoryview]]:
    """Where in the file which bytes of the piece go."""
    begin = place.start or (0,) * len(place.shape)
    # Where what the box and the piece share begins in the whole, and how large that is.
    first = tuple(map(max, spec.offset, begin))
    ends = map(min, map(operator.add, spec.offset, spec.shape), map(operator.add, begin, place.shape))
    shape = tuple(max(0, end - at) for at, end in zip(first, ends, strict=True))
    item = ITEM_BYTES[place.dtype]
    for offset, block in _blocks(shape, max(ITEM_BYTES[spec.dtype], item)):
        shared = tuple(map(operator.add, first, offset))
        data = _cast(tensor.read(tuple(map(operator.sub, shared, spec.offset)), block), spec.dtype, place.dtype)
        starts, stretch = stretches(place.shape, tuple(map(operator.sub, shared, begin)), block, item=item)
        for number, start in enumerate(starts):
            yield place.begin + start, data[number * stretch : (number + 1) * stretch]


def _blocks(shape: tuple[int, ...], item: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of boxes of about a block, which make up one of `shape`; none where that has no element."""
    if math.prod(shape) == 0:
        return
    rest = shape[1:]
    row = math.prod(rest) * item
    if math.prod(shape) * item <= _BLOCK:
        yield (0,) * len(shape), shape
    elif row <= _BLOCK:
        step = _BLOCK // row
        for first in range(0, shape[0], step):
            yield (first, *(0 for _ in rest)), (min(step, shape[0] - first), *rest)
    else:
        for first in range(shape[0]):
            for offset, block in _blocks(rest, item):
                yield (first, *offset), (1, *block)


def _cast(data: memoryview, held: str, wanted: str) -> memoryview:
    """Flat; rounded to nearest, ties to even, as torch does."""
    if held == wanted:
        return data.cast("B")
    import torch

    by_name = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    # A copy of its own: torch would warn of memory that it may not write to.
    values = torch.frombuffer(bytearray(data), dtype=by_name[held]).to(by_name[wanted])
    raw: memoryview = values.view(torch.uint8).numpy().data
    return raw
