"""The bytes of single tensors in host pages: handed out, put in, and compared."""

from collections.abc import Mapping, Sequence

import torch
import xxhash

from tidemill.contracts.checkpoint import SavedTensor, TensorBytes
from tidemill.errors import CheckpointError
from tidemill.residency.arena import Page
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger
from tidemill.units import MIB

__all__ = ["check_loadable", "checksum_of", "put_bytes", "tensor_bytes"]

_NOTHING = memoryview(b"")
_BLOCK_BYTES = 64 * MIB


def tensor_bytes(entry: Entry, pages: Sequence[Page]) -> TensorBytes:
    """The entry's elements, row-major, read-only. A copy only for a tensor that does not lie row-major."""
    return TensorBytes(
        dtype=entry.dtype_name,
        shape=entry.shape,
        data=_row_major(entry, pages).toreadonly(),
        whole=entry.whole,
        offset=entry.offset_in_whole,
    )


def _row_major(entry: Entry, pages: Sequence[Page]) -> memoryview:
    if entry.slab == NO_SLAB:
        return _NOTHING
    page = pages[entry.slab]
    if entry.row_major:
        return page.view[entry.offset : entry.offset + entry.bytes]
    copy = bytearray(entry.bytes)
    torch.frombuffer(copy, dtype=entry.dtype).view(entry.shape).copy_(entry.view(page.memory))
    return memoryview(copy)


def put_bytes(entry: Entry, page: Page, saved: SavedTensor) -> None:
    """Write saved bytes into the entry's place in a page: each is read once, a block of rows at a time.

    So what lies in pieces takes a block of host memory. Raises CheckpointError when there are not as many bytes.
    """
    if not entry.shape:
        _put_rows(entry, page, _exactly(entry.bytes, saved.read((), ()), entry), row=0)
        return
    rows, width = entry.shape[0], entry.shape[1:]
    row_bytes = entry.bytes // rows
    step = max(1, _BLOCK_BYTES // row_bytes)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        block = saved.read((row, *(0 for _ in width)), (count, *width))
        _put_rows(entry, page, _exactly(count * row_bytes, block, entry), row=row)


def _put_rows(entry: Entry, page: Page, block: memoryview, *, row: int) -> None:
    if entry.row_major:
        begin = entry.offset + (row * entry.bytes // entry.shape[0] if row else 0)
        page.view[begin : begin + len(block)] = block
        return
    # A copy of its own: torch would warn of memory that it may not write to.
    source = torch.frombuffer(bytearray(block), dtype=entry.dtype).view(-1, *entry.shape[1:])
    entry.view(page.memory)[row : row + len(source)].copy_(source)


def _exactly(wanted: int, block: memoryview, entry: Entry) -> memoryview:
    if block.nbytes != wanted:
        raise CheckpointError(
            f"cannot load {entry.name!r}: {block.nbytes} bytes were read where {wanted} are needed; the file is damaged"
        )
    return block.cast("B")


def check_loadable(ledger: Ledger, tensors: Mapping[str, SavedTensor]) -> None:
    """Raises CheckpointError unless `tensors` are exactly what the ledger lists. Reads nothing of them."""
    missing, unexpected = sorted(ledger.names() - set(tensors)), sorted(set(tensors) - ledger.names())
    if missing or unexpected:
        raise CheckpointError(
            f"cannot load: {len(missing)} tensors are missing {missing[:5]} and {len(unexpected)} are not known here "
            f"{unexpected[:5]}; the checkpoint is of another model or optimizer"
        )
    for entry in ledger:
        saved = tensors[entry.name]
        if (saved.dtype, saved.shape) != (entry.dtype_name, entry.shape):
            raise CheckpointError(
                f"cannot load {entry.name!r}: saved as {saved.dtype} {list(saved.shape)}, here it is "
                f"{entry.dtype_name} {list(entry.shape)}; the checkpoint is of another model or dtype"
            )


def checksum_of(entry: Entry, memory: torch.Tensor) -> int:
    """xxh3 of the entry's elements, row-major, in `memory`: its slab or its page."""
    if entry.slab == NO_SLAB:
        return xxhash.xxh3_64_intdigest(b"")
    copy = bytearray(entry.bytes)
    torch.frombuffer(copy, dtype=entry.dtype).view(entry.shape).copy_(entry.view(memory))
    return xxhash.xxh3_64_intdigest(copy)
