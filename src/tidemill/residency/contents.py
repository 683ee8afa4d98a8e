"""The bytes of single tensors in host pages: handed out, put in, and compared."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import xxhash

from tidemill.contracts.checkpoint import HeldTensor, SavedTensor, TensorBytes, TensorSpec, stretches
from tidemill.errors import CheckpointError
from tidemill.lanes import in_order
from tidemill.residency.arena import Reading
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger
from tidemill.residency.pages import PageRun
from tidemill.units import MIB

__all__ = ["PagedTensor", "PagedTensors", "check_loadable", "checksum_of", "put_all", "put_bytes"]

_NOTHING = memoryview(b"")
_BLOCK_BYTES = 2 * MIB
_THREADS = 8  # one alone copies at a part of what memory can do


class PagedTensors(Mapping[str, HeldTensor]):
    """All tensors of a ledger, by name, each made when it is asked for."""

    def __init__(self, ledger: Ledger, runs: Mapping[int, PageRun], reading: Reading) -> None:
        """`runs` are the pages of each slab."""
        self._entries = ledger.by_name
        self._runs = runs
        self._reading = reading

    def __getitem__(self, name: str) -> HeldTensor:
        entry = self._entries[name]
        return PagedTensor(entry, self._runs.get(entry.slab), self._reading)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


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

    def pieces(self) -> Sequence[memoryview]:
        """See HeldTensor."""
        run, entry = self._held_run(), self._entry
        if run is None:
            return ()
        if not entry.row_major:
            return (_row_major_copy(entry, run),)
        return [view.toreadonly() for view in run.views(entry.offset, entry.end)]

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


def put_all(entries: Iterable[Entry], run_of: Callable[[int], PageRun], tensors: Mapping[str, SavedTensor]) -> None:
    """`put_bytes` for each entry that lies in a slab, by several threads; `run_of` gives the pages of a slab.

    What lies in pieces takes a block of host memory a thread. Raises CheckpointError, and what reading raises.
    """
    runs = cache(run_of)
    parts = (part for entry in entries if entry.slab != NO_SLAB for part in _parts(entry, runs, tensors[entry.name]))
    in_order(_together(parts), lambda done: None, threads=_THREADS)


def put_bytes(entry: Entry, run: PageRun, saved: SavedTensor) -> None:
    """Write saved bytes into the entry's place in the pages of its slab: each is read once, a block of rows at a time.

    So what lies in pieces takes a block of host memory. Raises CheckpointError when there are not as many bytes.
    """
    for _, put in _parts(entry, lambda slab: run, saved):
        put()


_Part = tuple[int, Callable[[], object]]
"""Bytes, and what puts them in."""


def _parts(entry: Entry, run_of: Callable[[int], PageRun], saved: SavedTensor) -> Iterator[_Part]:
    """Of an entry; each may be done beside the others."""
    run = run_of(entry.slab)
    if not entry.row_major:
        yield entry.bytes, partial(_put_strided, entry, run, saved)
        return
    if entry.bytes <= _BLOCK_BYTES:
        yield entry.bytes, partial(_put_whole, entry, run, saved)
        return
    row_bytes = entry.bytes // entry.shape[0] if entry.shape else entry.bytes
    for row, count in _row_blocks(entry):
        yield count * row_bytes, partial(_put_rows, entry, run, saved, row, count)


def _together(parts: Iterable[_Part]) -> Iterator[Callable[[], None]]:
    """Jobs of a block at least: small tensors are not worth a thread's while one by one."""
    held, size = list[Callable[[], object]](), 0
    for count, put in parts:
        held.append(put)
        size += count
        if size >= _BLOCK_BYTES:
            yield partial(_one_by_one, held)
            held, size = [], 0
    if held:
        yield partial(_one_by_one, held)


def _one_by_one(puts: Sequence[Callable[[], object]]) -> None:
    for put in puts:
        # What was read is kept until the next is there: a file stays mapped while something of it is held.
        _held = put()


def _put_whole(entry: Entry, run: PageRun, saved: SavedTensor) -> memoryview:
    block = _exactly(entry.bytes, saved.read((0,) * len(entry.shape), entry.shape), entry)
    run.put(entry.offset, block)
    return block


def _put_rows(entry: Entry, run: PageRun, saved: SavedTensor, row: int, count: int) -> memoryview:
    block = _rows(entry, saved, row, count)
    run.put(entry.offset + row * (len(block) // count), block)
    return block


def _put_strided(entry: Entry, run: PageRun, saved: SavedTensor) -> None:
    tensor = _strided(entry, run)
    for row, count in _row_blocks(entry):
        # A copy of its own: torch would warn of memory that it may not write to.
        block = bytearray(_rows(entry, saved, row, count))
        source = torch.frombuffer(block, dtype=entry.dtype).view(-1, *entry.shape[1:])
        tensor[row : row + count].copy_(source)
    if len(run.spans(entry.offset, entry.end)) > 1:
        run.put(entry.offset, _raw(tensor))


def _raw(tensor: torch.Tensor) -> memoryview:
    """Every byte of the storage."""
    whole: memoryview = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().data
    return whole


def _row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """First row and number of rows of blocks, each of one row at least; a number is one row."""
    rows = entry.shape[0] if entry.shape else 1
    step = max(1, _BLOCK_BYTES * rows // entry.bytes)
    return ((row, min(step, rows - row)) for row in range(0, rows, step))


def _rows(entry: Entry, saved: SavedTensor, row: int, count: int) -> memoryview:
    """Flat, row-major."""
    if not entry.shape:
        return _exactly(entry.bytes, saved.read((), ()), entry)
    width = entry.shape[1:]
    block = saved.read((row, *(0 for _ in width)), (count, *width))
    return _exactly(count * (entry.bytes // entry.shape[0]), block, entry)


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
