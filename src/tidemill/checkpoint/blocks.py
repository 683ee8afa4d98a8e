"""A file as blocks: each has a checksum of its own, so that threads make and check them beside each other.

A block is a range of the file, header included, not of a tensor: what is damaged is a stretch of a disk.
"""

import mmap
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from tidemill.checkpoint.direct_file import open_direct
from tidemill.errors import CheckpointError
from tidemill.lanes import THREADS, in_order

__all__ = [
    "BLOCK_BYTES",
    "CHUNK_BYTES",
    "Buffers",
    "PastCache",
    "Reading",
    "Seen",
    "Stretch",
    "ThroughCache",
    "block_count",
    "block_range",
    "fill",
    "flat",
    "sums_of",
]

BLOCK_BYTES = 16 << 20
CHUNK_BYTES = 4 << 20  # what is read or written at once: four threads keep a disk busy, and little memory is taken
_AHEAD_BYTES = 1 << 20
_SMALL = 16 << 10  # bytes below which a copy is over before another thread could begin


def block_count(size: int) -> int:
    """Blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


def block_range(number: int, size: int) -> tuple[int, int]:
    """First byte of a block of a file of `size` bytes, and one past its last."""
    return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)


def flat(data: memoryview) -> memoryview:
    """The bytes of a contiguous view; memoryview itself refuses to cast a view of zero elements."""
    return data.cast("B") if data.nbytes else memoryview(b"")


class Buffers:
    """Memory in pages of its own, as direct reads and writes want it, for as many threads as ask at the same time."""

    def __init__(self, size: int, *, count: int = THREADS) -> None:
        """Of `size` bytes each, rounded up to pages."""
        self._size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._left = iter(range(count))

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """One that nobody else has; waits for it when all are in use."""
        buffer = self._get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)

    def _get(self) -> memoryview:
        if self._free.empty() and next(self._left, None) is not None:
            return memoryview(mmap.mmap(-1, self._size))
        return self._free.get()


def fill(buffer: memoryview, views: Iterable[memoryview]) -> int:
    """Copy flat `views` into `buffer`, one behind the other; how many bytes that is. Lets other threads go on."""
    array, at = np.frombuffer(buffer, dtype=np.uint8), 0
    for view in views:
        end = at + len(view)
        if end - at < _SMALL:
            buffer[at:end] = view
        else:
            np.copyto(array[at:end], np.frombuffer(view, dtype=np.uint8))
        at = end
    return at


@dataclass(frozen=True)
class Stretch:
    """Bytes `[begin, end)` of a file."""

    path: Path
    begin: int
    end: int


class Reading(Protocol):
    """One way to read a stretch."""

    def pieces(self, stretch: Stretch) -> Iterator[tuple[int, memoryview]]:
        """All its bytes in order, each piece with its place in the file; one is good until the next is asked for.

        Any thread may ask. Raises OSError, and CheckpointError for a file that became shorter.
        """
        ...


class ThroughCache:
    """Leaves what it reads in the system's cache of pages, for whoever reads the same soon."""

    def __init__(self) -> None:
        self._buffers = Buffers(CHUNK_BYTES)

    def pieces(self, stretch: Stretch) -> Iterator[tuple[int, memoryview]]:
        """See Reading."""
        descriptor = os.open(stretch.path, os.O_RDONLY)
        try:
            # All of it is asked for at once, in pieces: of a larger one the system reads no more ahead than of this.
            for ahead in range(stretch.begin, stretch.end, _AHEAD_BYTES):
                count = min(_AHEAD_BYTES, stretch.end - ahead)
                os.posix_fadvise(descriptor, ahead, count, os.POSIX_FADV_WILLNEED)
            with self._buffers.one() as buffer:
                yield from _read(descriptor, stretch, buffer)
        finally:
            os.close(descriptor)


class PastCache:
    """Straight from the disk, where the file system takes that: pages for the cache cost as much as the rest of it.

    Of stretches that begin at a multiple of 4096. A block is asked for at once: disks, and hosts of virtual ones, read
    ahead what is asked for in order, and many threads in small steps are no order.
    """

    def __init__(self) -> None:
        self._buffers = Buffers(BLOCK_BYTES)

    def pieces(self, stretch: Stretch) -> Iterator[tuple[int, memoryview]]:
        """See Reading."""
        descriptor = open_direct(stretch.path)
        try:
            with self._buffers.one() as buffer:
                yield from _read(descriptor, stretch, buffer)
        finally:
            os.close(descriptor)


def _read(descriptor: int, stretch: Stretch, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = stretch.begin
    while at < stretch.end:
        # A buffer whole, also where the stretch ends before it: direct reads are of whole pages.
        wanted = -(-(stretch.end - at) // mmap.PAGESIZE) * mmap.PAGESIZE
        count = min(os.preadv(descriptor, [buffer[:wanted]], at), stretch.end - at)
        if count == 0 or (at + count < stretch.end and count % mmap.PAGESIZE):
            raise CheckpointError(f"{stretch.path.name} became shorter while it was read")
        yield at, buffer[:count]
        at += count


Seen = Callable[[int, memoryview], None]
"""Is shown bytes of a stretch, with their place in the file."""


def sums_of(
    stretches: Sequence[tuple[Stretch, Reading, Seen]],
    taken: Callable[[int, str], None],
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Read stretches of files, several at the same time; `taken` is told, in order, the number and the xxh3 of each.

    What is read is shown in any order, by several threads. `advance` is told of bytes read, and may raise to stop.
    Raises OSError, CheckpointError for a file that became shorter, and what is raised where bytes are shown.
    """
    found: list[str] = []

    def told(digest: str) -> None:
        stretch = stretches[len(found)][0]
        taken(len(found), digest)
        found.append(digest)
        advance(stretch.end - stretch.begin)

    in_order((partial(_sum_of, *each) for each in stretches), told)


def _sum_of(stretch: Stretch, reading: Reading, seen: Seen) -> str:
    digest = xxhash.xxh3_64()
    for at, piece in reading.pieces(stretch):
        digest.update(piece)
        seen(at, piece)
    return digest.hexdigest()
