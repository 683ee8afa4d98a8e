"""tidemill.checkpoint.blocks and tidemill.checkpoint.verify: files as blocks, read by several threads and checked."""

import errno
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.checkpoint.pieces import Array, counted, piece

from tidemill.checkpoint.blocks import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Buffers,
    PastCache,
    Reading,
    Seen,
    Stretch,
    ThroughCache,
    block_count,
    block_range,
    fill,
    flat,
    sums_of,
)
from tidemill.checkpoint.manifest import FileEntry, Slice
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.verify import file_problems
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError

MIB = 1 << 20


def test_blocks_are_sixteen_mebibytes_of_the_file_and_the_last_one_is_what_is_left() -> None:
    assert [block_count(size) for size in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [0, 1, 1, 2]
    assert BLOCK_BYTES == 16 * MIB and block_range(1, BLOCK_BYTES + 5) == (BLOCK_BYTES, BLOCK_BYTES + 5)


def test_views_large_and_small_are_copied_one_behind_the_other() -> None:
    sizes = [0, 1, 3, 100_000, 0, 7, 16 << 10, (16 << 10) - 1]
    data = np.random.default_rng(1).integers(0, 256, sum(sizes), dtype=np.uint8).tobytes()
    ends = np.cumsum(sizes).tolist()
    views = [memoryview(data)[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    buffer = memoryview(bytearray(len(data) + 5))
    assert fill(buffer, views) == len(data)
    assert bytes(buffer) == data + bytes(5)


def test_a_view_of_no_elements_is_flat_too() -> None:
    assert flat(memoryview(np.zeros((0, 3)))).nbytes == 0
    assert bytes(flat(memoryview(np.arange(3, dtype=np.int16)))) == np.arange(3, dtype=np.int16).tobytes()


def test_there_are_no_more_buffers_than_threads_and_each_has_one_for_itself() -> None:
    buffers, held = Buffers(5, count=2), threading.Event()
    with buffers.one() as first, buffers.one() as second:
        first[:], second[:] = b"\x01" * len(first), b"\x02" * len(second)
        assert len(first) == 4096 and first[0] == 1
        waiting = threading.Thread(target=lambda: [held.set() for _ in [buffers.one().__enter__()]])
        waiting.start()
        assert not held.wait(0.05)
    assert held.wait(5)
    waiting.join()


def unseen(at: int, data: memoryview) -> None:
    """Nobody wants it."""


def read_by(way: Reading, stretches: list[Stretch], seen: Seen = unseen) -> list[tuple[Stretch, Reading, Seen]]:
    """All in one way."""
    return [(stretch, way, seen) for stretch in stretches]


def test_sums_of_stretches_are_those_of_their_bytes_in_order(tmp_path: Path) -> None:
    data = np.random.default_rng(2).integers(0, 256, 2 * CHUNK_BYTES + 77, dtype=np.uint8).tobytes()
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[:1000])
    ends = [(0, len(data)), (5, 5), (77, CHUNK_BYTES + 99), (1, 2)]
    stretches = [Stretch(tmp_path / "a", begin, end) for begin, end in ends] + [Stretch(tmp_path / "b", 1, 1000)]
    found: list[tuple[int, str]] = []
    told: list[int] = []
    sums_of(read_by(ThroughCache(), stretches), lambda number, digest: found.append((number, digest)), told.append)
    wanted = [data[begin:end] for begin, end in ends] + [data[1:1000]]
    assert found == [(number, xxhash.xxh3_64_hexdigest(part)) for number, part in enumerate(wanted)]
    assert told == [len(part) for part in wanted]


WAYS = [ThroughCache, PastCache]


@pytest.mark.parametrize("way", WAYS)
def test_all_bytes_are_shown_with_their_place_whichever_way_they_are_read(tmp_path: Path, way: type[Reading]) -> None:
    data = np.random.default_rng(3).integers(0, 256, 2 * CHUNK_BYTES + 77, dtype=np.uint8).tobytes()
    (tmp_path / "a").write_bytes(data)
    stretches = [Stretch(tmp_path / "a", *ends) for ends in ((0, 4096), (4096, CHUNK_BYTES + 8192), (8192, len(data)))]
    for stretch in stretches:
        shown: dict[int, bytes] = {}
        digests: list[str] = []
        show = partial(lambda shown, at, piece: shown.update({at: bytes(piece)}), shown)
        sums_of(read_by(way(), [stretch], show), lambda number, digest, kept=digests: kept.append(digest))
        wanted = data[stretch.begin : stretch.end]
        assert b"".join(shown[at] for at in sorted(shown)) == wanted and min(shown) == stretch.begin
        assert digests == [xxhash.xxh3_64_hexdigest(wanted)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [10, 4096, 5000])
def test_a_file_that_becomes_shorter_is_said_to_and_a_missing_one_is_an_os_error(
    tmp_path: Path, way: type[Reading], size: int
) -> None:
    (tmp_path / "a").write_bytes(bytes(size))
    for end in (size + 1, size + 4096, 3 * CHUNK_BYTES):
        with pytest.raises(CheckpointError, match="a became shorter while it was read"):
            sums_of(read_by(way(), [Stretch(tmp_path / "a", 0, end)]), lambda number, digest: None)
    with pytest.raises(FileNotFoundError):
        sums_of(read_by(way(), [Stretch(tmp_path / "gone", 0, 11)] * 3), lambda number, digest: None)


def test_where_direct_reads_are_refused_files_are_read_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    opened, flags = os.open, list[int]()

    def refusing(path: Path, flag: int) -> int:
        flags.append(flag)
        if flag & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flag)

    monkeypatch.setattr("tidemill.checkpoint.direct_file.os.open", refusing)
    digests: list[str] = []
    sums_of(read_by(PastCache(), [Stretch(tmp_path / "a", 0, 5000)]), lambda number, digest: digests.append(digest))
    assert digests == [xxhash.xxh3_64_hexdigest(b"x" * 5000)] and flags == [os.O_RDONLY | os.O_DIRECT, os.O_RDONLY]


def written(folder: Path, arrays: dict[str, tuple[Array, str]]) -> FileEntry:
    """Of a file of these arrays and their dtypes in `folder`."""
    tensors = {name: piece(array, (0,), array.shape, dtype) for name, (array, dtype) in arrays.items()}
    state = RunState(step=1, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    (file,) = stage(state, {"trainer": Snapshot(shards=[LocalShard(tensors)])}).files
    return file.entry(file.shard.write(folder / file.name, lambda count: None).blocks)


@pytest.fixture
def entry(tmp_path: Path) -> FileEntry:
    """Of a file of three blocks in `tmp_path`: `small` lies in the first, `w` in all, `tail` in the last."""
    shapes = {"small": (4, "I64"), "tail": (9, "U8"), "w": (10 * MIB, "F32")}
    return written(tmp_path, {name: (counted((size,), dtype), dtype) for name, (size, dtype) in shapes.items()})


def damaged(path: Path, places: list[int]) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1]))


def test_a_whole_file_has_no_problem_and_all_of_it_is_read(tmp_path: Path, entry: FileEntry) -> None:
    told: list[int] = []
    assert file_problems(tmp_path, [entry], told.append) == []
    assert sum(told) == entry.bytes and len(entry.blocks) == 3


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([4096], "small, w in bytes [0, 16777216)"),
        ([17 * MIB], "w in bytes [16777216, 33554432)"),
        ([40 * MIB + 4100], "w, tail in bytes [33554432, 41947177)"),
        ([4096, 17 * MIB], "small, w in bytes [0, 33554432)"),
        ([5000, 33 * MIB], "small, w, tail in bytes [0, 16777216), [33554432, 41947177)"),
    ],
)
def test_damage_is_told_by_the_tensors_in_it_and_its_bytes(
    tmp_path: Path, entry: FileEntry, places: list[int], said: str
) -> None:
    damaged(tmp_path / entry.name, places)
    assert file_problems(tmp_path, [entry], lambda count: None) == [f"the checksum of {said} of {entry.name} differs"]


def test_a_long_list_of_tensors_ends_with_how_many_more_there_are(tmp_path: Path) -> None:
    many = written(tmp_path, {name: (counted((4,)), "F32") for name in "abcde"})
    damaged(tmp_path / many.name, [4096])
    (text,) = file_problems(tmp_path, [many], lambda count: None)
    assert "of a, b, c and 2 tensors more in bytes [0, 4176)" in text


def test_a_header_that_is_not_byte_for_byte_ours_is_read_and_compared(tmp_path: Path) -> None:
    few = written(tmp_path, {name: (counted((4,)), "F32") for name in "ab"})
    path = tmp_path / few.name
    data = path.read_bytes()

    def problems(old: bytes, new: bytes, **slices: Slice) -> list[str]:
        path.write_bytes(data.replace(old, new, 1).replace(b" " * (len(new) - len(old)), b"", 1))
        listed = tuple(slices.get(one.name, one) for one in few.slices)
        entry = replace(few, slices=listed, blocks=(checksum(path.read_bytes()),))
        return file_problems(tmp_path, [entry], lambda count: None)

    assert problems(b"", b"") == []
    assert problems(b'"dtype":"F32","shape":[4]', b'"shape":[4],"dtype":"F32"') == []
    assert "describe different tensors" in problems(b'"b"', b'"c"')[0]
    second = few.slices[1]
    assert "describe different tensors" in problems(b"", b"", b=second._replace(name="a"))[0]
    assert "describe different tensors" in problems(b"", b"", b=second._replace(begin=4096, end=4112))[0]
    negative = second._replace(local_shape=(-4, -1))
    assert "shape [-4, -1]" in problems(b'[4],"data_offsets":[16', b'[-4,-1],"data_offsets":[16', b=negative)[0]


def test_a_manifest_with_too_few_checksums_is_noticed(tmp_path: Path, entry: FileEntry) -> None:
    (text,) = file_problems(tmp_path, [replace(entry, blocks=entry.blocks[:2])], lambda count: None)
    assert text == f"manifest.json has 2 checksums of {entry.name}, not 3"


def test_what_is_raised_by_who_is_told_ends_the_reading(tmp_path: Path, entry: FileEntry) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        file_problems(tmp_path, [entry], stop)
    assert threading.active_count() == before
