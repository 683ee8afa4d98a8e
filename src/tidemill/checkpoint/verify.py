"""Whether files are what their manifest says: sizes, what is in them, and every byte."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tidemill.checkpoint.blocks import (
    PastCache,
    Reading,
    Seen,
    Stretch,
    ThroughCache,
    block_count,
    block_range,
    sums_of,
)
from tidemill.checkpoint.landing import LandingFile
from tidemill.checkpoint.manifest import MANIFEST, FileEntry
from tidemill.checkpoint.safetensors_file import read_header
from tidemill.checkpoint.safetensors_header import Slot, fits, pack_header
from tidemill.contracts.landing import Landing
from tidemill.errors import CheckpointError

__all__ = ["file_problems", "size_problem"]

_SHOWN = 3
_NO_LANDINGS: Mapping[str, Landing] = MappingProxyType({})


def size_problem(path: Path, entry: FileEntry) -> str:
    """What is wrong with the size of a file; "" when nothing is."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{entry.name} is missing"
    return "" if size == entry.bytes else f"{entry.name} has {size} of {entry.bytes} bytes"


def file_problems(
    folder: Path,
    entries: Sequence[FileEntry],
    advance: Callable[[int], None],
    landings: Mapping[str, Landing] = _NO_LANDINGS,
) -> list[str]:
    """What is wrong with files of tensors, in their order, one after the other; empty when nothing is.

    `advance` is told of bytes read and may raise to stop. `landings` are where the tensors of some parts are put
    meanwhile, right or wrong. Raises OSError for a file that cannot be read.
    """
    problems = {entry.name: found for entry in entries if (found := _outer_problem(folder / entry.name, entry))}
    whole = [entry for entry in entries if entry.name not in problems]
    expected = [
        (entry, Stretch(folder / entry.name, begin, end), wanted)
        for entry in whole
        for begin, end, wanted in _expected(entry)
    ]
    damaged: dict[str, list[Stretch]] = {}

    def taken(number: int, found: str) -> None:
        entry, stretch, wanted = expected[number]
        if found != wanted:
            damaged.setdefault(entry.name, []).append(stretch)

    ways = _ways(whole, landings)
    sums_of([(stretch, *ways[entry.name]) for entry, stretch, _ in expected], taken, advance)
    problems |= {entry.name: _damage(entry, damaged[entry.name]) for entry in entries if entry.name in damaged}
    return [problems[entry.name] for entry in entries if entry.name in problems]


def _ways(entries: Sequence[FileEntry], landings: Mapping[str, Landing]) -> dict[str, tuple[Reading, Seen]]:
    """How each file is read: one whose bytes land is read no more afterwards."""
    through, past = ThroughCache(), PastCache()
    return {
        entry.name: (past, LandingFile(entry, landings[entry.part]).seen)
        if entry.part in landings and entry.blocks
        else (through, _unseen)
        for entry in entries
    }


def _unseen(at: int, data: memoryview) -> None:
    """Nobody wants it."""


def _outer_problem(path: Path, entry: FileEntry) -> str:
    if wrong := size_problem(path, entry):
        return wrong
    if entry.blocks and len(entry.blocks) != block_count(entry.bytes):
        return f"{MANIFEST} has {len(entry.blocks)} checksums of {entry.name}, not {block_count(entry.bytes)}"
    if _as_we_write(path, entry):
        return ""
    try:
        header = read_header(path)
    except CheckpointError as error:
        return str(error)
    start = header.data_start
    found = [(slot.name, slot.dtype, slot.shape, start + slot.begin, start + slot.end) for slot in header.slots]
    listed = [(piece.name, piece.dtype, piece.local_shape, piece.begin, piece.end) for piece in entry.slices]
    return "" if sorted(found) == sorted(listed) else f"{entry.name} and {MANIFEST} describe different tensors"


def _as_we_write(path: Path, entry: FileEntry) -> bool:
    """Whether the header is, byte for byte, ours of the slices listed: then nothing of it needs to be parsed."""
    if not entry.slices:
        return False
    start = entry.slices[0].begin
    slots = [
        Slot(piece.name, piece.dtype, piece.local_shape, piece.begin - start, piece.end - start)
        for piece in entry.slices
    ]
    if not fits(slots) or start + slots[-1].end != entry.bytes:
        return False
    header = pack_header(tuple(slots), {})
    with path.open("rb") as file:
        return len(header) == start and file.read(start) == header


def _expected(entry: FileEntry) -> Iterator[tuple[int, int, str]]:
    """Ranges of a file with their checksums: its blocks, or its slices where an older format has those."""
    if not entry.blocks:
        yield from ((piece.begin, piece.end, piece.xxh3) for piece in entry.slices)
    for number, wanted in enumerate(entry.blocks):
        yield (*block_range(number, entry.bytes), wanted)


def _damage(entry: FileEntry, stretches: Sequence[Stretch]) -> str:
    """Damaged ranges, those that follow each other as one, and the tensors in them."""
    joined: list[tuple[int, int]] = []
    for stretch in stretches:
        begin = joined.pop()[0] if joined and joined[-1][1] == stretch.begin else stretch.begin
        joined.append((begin, stretch.end))
    hit = [piece.name for piece in entry.slices if any(_meet(piece.begin, piece.end, *where) for where in joined)]
    where = _some([f"[{begin}, {end})" for begin, end in joined], "ranges")
    return f"the checksum of {_some(hit, 'tensors') or 'no tensor'} in bytes {where} of {entry.name} differs"


def _meet(begin: int, end: int, first: int, last: int) -> bool:
    return begin < last and first < end


def _some(words: Sequence[str], what: str) -> str:
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} {what} more" if more > 0 else "")
