"""Plain safetensors files, written as a stream and mapped when read: no torch, no pickle, no copy of the whole.

Every tensor gets a checksum (xxh3, 64 bits, 16 hexadecimal digits) of its bytes while it is written. The checksums are
the caller's to keep. What is written is durable when `write_tensors` returns, save for its name in the folder.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from tidemill.checkpoint.durable import sync, write_all
from tidemill.checkpoint.safetensors_header import Header, Slot, header_size, lay_out, pack_header, parse_header
from tidemill.contracts.checkpoint import HeldTensor, TensorBytes
from tidemill.errors import CheckpointError
from tidemill.faults import point

__all__ = ["TensorFile", "checksum", "file_size", "flat", "slots_of", "write_tensors"]

CHUNK = 8 << 20


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


def flat(data: memoryview) -> memoryview:
    """The bytes of a contiguous view; memoryview itself refuses to cast a view of zero elements."""
    return data.cast("B") if data.nbytes else memoryview(b"")


def checksum(data: memoryview | bytes, advance: Callable[[int], None] = lambda count: None) -> str:
    """xxh3 of the bytes; `advance` is told how many were read, piece by piece, and may raise to stop."""
    digest, view = xxhash.xxh3_64(), flat(memoryview(data))
    for start in range(0, len(view), CHUNK):
        piece = view[start : start + CHUNK]
        digest.update(piece)
        advance(len(piece))
    return digest.hexdigest()


def write_tensors(
    path: Path,
    slots: tuple[Slot, ...],
    pieces_of: Callable[[str], Iterable[memoryview]],
    *,
    metadata: Mapping[str, str],
    faults: str,
    advance: Callable[[int], None],
    written: Callable[[str], None] = lambda name: None,
) -> dict[str, str]:
    """Create and fsync `path`, asking for each tensor's bytes once, in the order of `slots`; checksums by name.

    A tensor's bytes may come in pieces. `faults` is the prefix of the fault points passed; `advance` is told of bytes
    written and may raise to stop; `written` of each tensor when its bytes are read no more.
    """
    point(f"{faults}.open")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        point(f"{faults}.write")
        write_all(descriptor, pack_header(slots, metadata))
        sums = {}
        for slot in slots:
            sums[slot.name] = _write_one(descriptor, pieces_of(slot.name), faults, advance)
            written(slot.name)
        sync(descriptor, fault=f"{faults}.fsync-file")
    finally:
        os.close(descriptor)
    return sums


def _write_one(descriptor: int, pieces: Iterable[memoryview], faults: str, advance: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_64()
    for chunk in _chunks(pieces):
        point(f"{faults}.write")
        write_all(descriptor, chunk)
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def _chunks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in map(flat, pieces):
        for start in range(0, len(piece), CHUNK):
            yield piece[start : start + CHUNK]


class TensorFile:
    """A safetensors file mapped for reading. Its views stay valid as long as someone holds them."""

    def __init__(self, path: Path) -> None:
        """Map `path` and check its header. Raises CheckpointError that says what is wrong, OSError for no access."""
        self.path = path
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            try:
                wanted = header_size(os.pread(descriptor, 8, 0), size)
                self.header: Header = parse_header(os.pread(descriptor, wanted, 8), size)
            except CheckpointError as error:
                raise CheckpointError(f"{path.name} {error}") from None
            self._view = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
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
