"""The bytes of single tensors in host pages: handed out, put in, and compared."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from tidemill.contracts.checkpoint import SavedTensor, TensorBytes, TensorSpec, stretches
from tidemill.errors import CheckpointError
from tidemill.residency.arena import Reading
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger
from tidemill.residency.pages import PageRun
from tidemill.units import MIB

__all__ = ["PagedTensor", "check_loadable", "checksum_of", "put_bytes"]

_NOTHING = memoryview(b"")
_BLOCK_BYTES = 64 * MIB


class PagedTensor:
    """Implements HeldTensor: an entry's elements in the pages of its slab, read-only, while `reading` holds them.

    A tensor that does not lie row-major is copied whenever it is read.
    """

    __slots__ = ("_entry", "_reading", "_run")

    def __init__(self, entry: Entry, run: PageRun | None, reading: Reading) -> None:
        """Without a run it has no elements."""
        self._entry = entry
        self._run = run
        self._reading = reading

    @property
    def dtype(self) -> str:
        """See SavedTensor."""
        return self._entry.dtype_name

    @property
    def shape(self) -> tuple[int, ...]:
        """See SavedTensor; of the piece."""
        return self._entry.shape

    @property
    def nbytes(self) -> int:
        """See HeldTensor."""
        return self._entry.bytes

    @property
    def spec(self) -> TensorSpec:
        """See HeldTensor."""
        return self._entry.spec

    def pieces(self) -> Iterator[memoryview]:
        """See HeldTensor."""
        run = self._held_run()
        if run is None:
            return iter(())
        if not self._entry.row_major:
            return iter((_row_major_copy(self._entry, run),))
        return (view.toreadonly() for view in run.views(self._entry.offset, self._entry.end))

    @property
    def data(self) -> memoryview:
        """See SavedTensor."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        """See SavedTensor."""
        run, entry = self._held_run(), self._entry
        if run is None or 0 in shape:
            return _NOTHING
        if not entry.row_major:
            box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            return _bytes_of(_strided(entry, run)[box]).toreadonly()
        starts, count = stretches(entry.shape, offset, shape, item=entry.dtype.itemsize)
        found = [run.joined(entry.offset + start, entry.offset + start + count) for start in starts]
        return (found[0] if len(found) == 1 else memoryview(b"".join(found))).toreadonly()

    def _held_run(self) -> PageRun | None:
        if not self._reading.holds(self._entry.name):
            raise CheckpointError(
                f"cannot read {self._entry.name!r} from the host copy: it was let go of, and others may write there "
                "now; take another snapshot"
            )
        return self._run

    def __reduce__(self) -> tuple[Any, ...]:
        # Pages cannot be sent to another process; their bytes can.
        spec = self.spec
        return _sent, (spec.dtype, spec.shape, bytes(self.data), spec.whole, spec.offset)


def _sent(dtype: str, shape: tuple[int, ...], data: bytes, *piece: tuple[int, ...]) -> TensorBytes:
    return TensorBytes(dtype=dtype, shape=shape, data=memoryview(data), whole=piece[0], offset=piece[1])


def _strided(entry: Entry, run: PageRun) -> torch.Tensor:
    """The entry as a tensor: over the pages where they are adjacent, else over a copy of all that it spans."""
    spans = run.spans(entry.offset, entry.end)
    if len(spans) == 1:
        return _placed(entry, run.memory[spans[0][0] : spans[0][1]])
    copy = bytearray().join(run.views(entry.offset, entry.end))
    return _placed(entry, torch.frombuffer(copy, dtype=torch.uint8))


def _placed(entry: Entry, memory: torch.Tensor) -> torch.Tensor:
    start = memory.storage_offset() // entry.dtype.itemsize
    return torch.empty(0, dtype=entry.dtype).set_(memory.untyped_storage(), start, entry.shape, entry.stride)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    copy = bytearray(tensor.numel() * tensor.element_size())
    torch.frombuffer(copy, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return memoryview(copy)


def _row_major_copy(entry: Entry, run: PageRun) -> memoryview:
    return _bytes_of(_strided(entry, run)).toreadonly()


def put_bytes(entry: Entry, run: PageRun, saved: SavedTensor) -> None:
    """Write saved bytes into the entry's place in the pages of its slab: each is read once, a block of rows at a time.

    So what lies in pieces takes a block of host memory. Raises CheckpointError when there are not as many bytes.
    """
    if entry.row_major:
        done = 0
        for block in _blocks(entry, saved):
            run.put(entry.offset + done, block)
            done += len(block)
        return
    tensor, row = _strided(entry, run), 0
    for block in _blocks(entry, saved):
        # A copy of its own: torch would warn of memory that it may not write to.
        source = torch.frombuffer(bytearray(block), dtype=entry.dtype).view(-1, *entry.shape[1:])
        tensor[row : row + len(source)].copy_(source)
        row += len(source)
    if len(run.spans(entry.offset, entry.end)) > 1:
        run.put(entry.offset, _raw(tensor))


def _raw(tensor: torch.Tensor) -> memoryview:
    """Every byte of the storage."""
    whole: memoryview = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().data
    return whole


def _blocks(entry: Entry, saved: SavedTensor) -> Iterator[memoryview]:
    """Flat, whole rows each, row-major."""
    if not entry.shape:
        yield _exactly(entry.bytes, saved.read((), ()), entry)
        return
    rows, width = entry.shape[0], entry.shape[1:]
    row_bytes = entry.bytes // rows
    step = max(1, _BLOCK_BYTES // row_bytes)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        block = saved.read((row, *(0 for _ in width)), (count, *width))
        yield _exactly(count * row_bytes, block, entry)


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


def checksum_of(entry: Entry, held: torch.Tensor | PageRun) -> int:
    """xxh3 of the entry's elements, row-major, in its slab's device memory or in the pages."""
    if entry.slab == NO_SLAB:
        return xxhash.xxh3_64_intdigest(b"")
    tensor = _strided(entry, held) if isinstance(held, PageRun) else entry.view(held)
    return xxhash.xxh3_64_intdigest(_bytes_of(tensor))
