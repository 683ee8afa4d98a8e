"""Plain safetensors files, written by several threads and mapped when read: no torch, no pickle, no copy of the whole.

Every block of the file gets a checksum (xxh3, 64 bits, 16 hexadecimal digits) while it is written. The checksums are
the caller's to keep. What is written is durable when `write_tensors` returns, save for its name in the folder.
"""

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import xxhash

from tidemill.checkpoint.blocks import BLOCK_BYTES, CHUNK_BYTES, Buffers, block_range, fill, flat
from tidemill.checkpoint.direct_file import ALIGNMENT, DirectFile
from tidemill.checkpoint.safetensors_header import Header, Slot, header_size, lay_out, pack_header, parse_header
from tidemill.contracts.checkpoint import HeldTensor, TensorBytes, WrittenFile
from tidemill.errors import CheckpointError
from tidemill.faults import point
from tidemill.lanes import in_order

__all__ = ["TensorFile", "checksum", "file_size", "flat", "read_header", "slots_of", "write_tensors"]

_HASHED = 8 << 20  # bytes hashed at once


def slots_of(tensors: Mapping[str, HeldTensor]) -> tuple[Slot, ...]:
    """The layout of a file of these tensors. Raises CheckpointError when bytes, dtype and shape do not agree."""
    slots = lay_out({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    for slot in slots:
        held, wanted = tensors[slot.name].nbytes, slot.end - slot.begin
        if held != wanted:
            raise CheckpointError(
                f"cannot write tensor {slot.name!r}: it has {held} bytes, but shape {list(slot.shape)} of "
                f"{slot.dtype} takes {wanted}"
            )
    return slots


def file_size(slots: tuple[Slot, ...], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes of the file that `write_tensors` makes of `slots`."""
    return len(pack_header(slots, metadata or {})) + (slots[-1].end if slots else 0)


def checksum(data: memoryview | bytes, advance: Callable[[int], None] = lambda count: None) -> str:
    """xxh3 of the bytes; `advance` is told how many were read, piece by piece, and may raise to stop."""
    digest, view = xxhash.xxh3_64(), flat(memoryview(data))
    for start in range(0, len(view), _HASHED):
        piece = view[start : start + _HASHED]
        digest.update(piece)
        advance(len(piece))
    return digest.hexdigest()


def write_tensors(
    path: Path,
    slots: tuple[Slot, ...],
    pieces_of: Callable[[str], Iterable[memoryview]],
    *,
    header: bytes,
    faults: str,
    advance: Callable[[int], None],
    written: Callable[[str], None] = lambda name: None,
) -> WrittenFile:
    """Create and fsync `path`, asking for each tensor's bytes once, in the order of `slots`, whose header is `header`.

    A tensor's bytes may come in pieces. `faults` is the prefix of the fault points passed; `advance` is told of bytes
    written and may raise to stop; `written` of each tensor when its bytes are read no more. All of these are called
    by the caller's thread, in the order of the file, while others copy, hash and write. Raises OSError, and
    CheckpointError when a tensor has other bytes than its slot; nothing writes to `path` any more then.
    """
    size = len(header) + (slots[-1].end if slots else 0)
    reached = _Reached(slots, len(header), written)
    sums: list[str] = []

    def taken(found: str) -> None:
        sums.append(found)
        begin, end = block_range(len(sums) - 1, size)
        advance(end - begin)
        reached.tell(end)

    point(f"{faults}.open")
    file = DirectFile(path, size)
    try:
        buffers = Buffers(min(size, CHUNK_BYTES))
        chunks = _chunks(chain((memoryview(header),), _all_pieces(slots, pieces_of)))
        in_order(_jobs(file, chunks, buffers, faults=faults), taken)
        file.finish(f"{faults}.fsync-file")
    finally:
        file.close()
    return WrittenFile(blocks=tuple(sums), direct=file.direct)


class _Reached:
    """Tells of each tensor once all of it is written, in the order of the file."""

    def __init__(self, slots: tuple[Slot, ...], data_start: int, written: Callable[[str], None]) -> None:
        self._left = iter(slots)
        self._next = next(self._left, None)
        self._start = data_start
        self._written = written

    def tell(self, end: int) -> None:
        """All bytes before `end` are written."""
        while self._next is not None and self._start + self._next.end <= end:
            self._written(self._next.name)
            self._next = next(self._left, None)


def _jobs(
    file: DirectFile, chunks: Iterator[list[memoryview]], buffers: Buffers, *, faults: str
) -> Iterator[Callable[[], str]]:
    """One for each block."""
    each = BLOCK_BYTES // CHUNK_BYTES
    for start in itertools.count(0, BLOCK_BYTES):
        block = list(itertools.islice(chunks, each))
        if not block:
            return
        point(f"{faults}.write")
        yield partial(_write_block, file, start, block, buffers)


def _write_block(file: DirectFile, start: int, chunks: list[list[memoryview]], buffers: Buffers) -> str:
    digest = xxhash.xxh3_64()
    with buffers.one() as buffer:
        for views in chunks:
            data = views[0] if len(views) == 1 and _as_it_lies(views[0]) else _gathered(buffer, views)
            file.write(start, data)
            count = sum(map(len, views))
            digest.update(data[:count])
            start += count
    return digest.hexdigest()


def _as_it_lies(view: memoryview) -> bool:
    """Whether it can be written past the page cache without being moved: so it is with what fills whole pages."""
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address % ALIGNMENT == 0 and len(view) % ALIGNMENT == 0


def _gathered(buffer: memoryview, views: list[memoryview]) -> memoryview:
    """One behind the other, and zeros to the next multiple of what is written."""
    count = fill(buffer, views)
    padded = -(-count // ALIGNMENT) * ALIGNMENT
    buffer[count:padded] = bytes(padded - count)
    return buffer[:padded]


def _all_pieces(slots: tuple[Slot, ...], pieces_of: Callable[[str], Iterable[memoryview]]) -> Iterator[memoryview]:
    for slot in slots:
        left = slot.end - slot.begin
        for piece in pieces_of(slot.name):
            view = piece if piece.ndim == 1 and piece.format == "B" else flat(piece)
            left -= len(view)
            yield view
        if left:
            raise CheckpointError(
                f"tensor {slot.name!r} gave {-left:+d} bytes beside the {slot.end - slot.begin} it has"
            )


def _chunks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, cut where a chunk is full: what each holds, the last one being shorter."""
    held, room = list[memoryview](), CHUNK_BYTES
    for view in views:
        while len(view) >= room:
            held.append(view[:room])
            view = view[room:]
            yield held
            held, room = [], CHUNK_BYTES
        if len(view):
            held.append(view)
            room -= len(view)
    if held:
        yield held


def read_header(path: Path) -> Header:
    """The header of `path`, checked. Raises CheckpointError that says what is wrong, OSError for no access."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _header(descriptor, path)
    finally:
        os.close(descriptor)


def _header(descriptor: int, path: Path) -> Header:
    size = os.fstat(descriptor).st_size
    try:
        wanted = header_size(os.pread(descriptor, 8, 0), size)
        return parse_header(os.pread(descriptor, wanted, 8), size)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name} {error}") from None


class TensorFile:
    """A safetensors file mapped for reading. Its views stay valid as long as someone holds them."""

    def __init__(self, path: Path) -> None:
        """Map `path` and check its header. Raises CheckpointError that says what is wrong, OSError for no access."""
        self.path = path
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.header = _header(descriptor, path)
            self._view = memoryview(mmap.mmap(descriptor, self.header.file_bytes, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)

    def tensors(self) -> dict[str, TensorBytes]:
        """Every tensor by name, as a read-only view of the file."""
        start = self.header.data_start
        return {
            slot.name: TensorBytes(
                dtype=slot.dtype, shape=slot.shape, data=self._view[start + slot.begin : start + slot.end]
            )
            for slot in self.header.slots
        }
