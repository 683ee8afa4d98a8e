import errno
import mmap
import os
import random
import struct
import threading
from pathlib import Path

import numpy
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.checkpoint.safetensors_file import TensorFile, checksum, file_size, slots_of, write_tensors
from tidemill.checkpoint.safetensors_header import lay_out, pack_header
from tidemill.contracts.checkpoint import TensorBytes, WrittenFile
from tidemill.errors import CheckpointError
from tidemill.faults import FaultInjected, armed, passed

ARRAYS = {
    "w": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
    "step": numpy.array(7, dtype=numpy.int64),
    "mask": numpy.array([True, False, True]),
    "nothing": numpy.zeros((0, 5), dtype=numpy.float32),
    "ünï ☃": numpy.arange(5, dtype=numpy.uint8),
}
DTYPES = {"float32": "F32", "int64": "I64", "bool": "BOOL", "uint8": "U8"}


def as_bytes(arrays: dict[str, numpy.ndarray]) -> dict[str, TensorBytes]:
    return {
        name: TensorBytes(dtype=DTYPES[str(array.dtype)], shape=array.shape, data=memoryview(array.tobytes()))
        for name, array in arrays.items()
    }


def write(path: Path, tensors: dict[str, TensorBytes]) -> WrittenFile:
    return write_tensors(
        path,
        slots_of(tensors),
        lambda name: tensors[name].pieces(),
        header=pack_header(slots_of(tensors), {"format": "pt"}),
        faults="checkpoint",
        advance=lambda count: None,
    )


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "a b ü.safetensors"
    write(path, as_bytes(ARRAYS))
    read = safetensors.numpy.load_file(path)
    assert set(read) == set(ARRAYS)
    for name, array in ARRAYS.items():
        numpy.testing.assert_array_equal(read[name], array)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "a.safetensors")
    read = TensorFile(tmp_path / "a.safetensors").tensors()
    assert {name: bytes(tensor.data) for name, tensor in read.items()} == {n: a.tobytes() for n, a in ARRAYS.items()}


def test_views_outlive_the_file_object_and_the_file(tmp_path: Path) -> None:
    tensors = as_bytes(ARRAYS)
    write(tmp_path / "a", tensors)
    read = TensorFile(tmp_path / "a").tensors()
    (tmp_path / "a").unlink()
    assert all(bytes(read[name].data) == bytes(tensors[name].data) for name in tensors)
    assert all(read[name].data.readonly for name in tensors)


def test_checksums_are_those_of_the_file_and_sizes_are_known_beforehand(tmp_path: Path) -> None:
    tensors = as_bytes(ARRAYS)
    blocks = write(tmp_path / "a", tensors).blocks
    data = (tmp_path / "a").read_bytes()
    assert blocks == (xxhash.xxh3_64(data).hexdigest(),) == (checksum(data),)
    assert (tmp_path / "a").stat().st_size == file_size(slots_of(tensors), {"format": "pt"})


def test_a_view_of_other_elements_is_written_as_its_bytes(tmp_path: Path) -> None:
    array = ARRAYS["w"]
    write(tmp_path / "a", {"w": TensorBytes(dtype="F32", shape=array.shape, data=array.data)})
    numpy.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "a")["w"], array)


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 4 bytes, but shape \\[2\\] of F32 takes 8"):
        slots_of({"w": TensorBytes(dtype="F32", shape=(2,), data=memoryview(b"1234"))})


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1 << 40), struct.pack("<Q", 2) + b"{"])
def test_a_cut_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cut.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cut.safetensors"):
        TensorFile(tmp_path / "cut.safetensors")


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", as_bytes(ARRAYS))
    assert (tmp_path / "a").read_bytes() == b"mine"


BLOCK, CHUNK = 16384, 4096


@st.composite
def tensors_in_pieces(draw: st.DrawFn) -> dict[str, list[bytes]]:
    """Bytes of tensors of bytes, each in pieces, some of which are empty."""
    lengths = st.lists(st.integers(0, 9000), min_size=0, max_size=4)
    sizes = draw(st.lists(lengths, max_size=8))
    dice = random.Random(draw(st.integers(0, 1 << 30)))
    return {f"w{number:02d}": [dice.randbytes(size) for size in pieces] for number, pieces in enumerate(sizes)}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=tensors_in_pieces())
def test_a_file_of_any_blocks_is_the_header_and_the_bytes_one_behind_the_other(
    tensors: dict[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("safetensors_file", "blocks"):
        monkeypatch.setattr(f"tidemill.checkpoint.{module}.BLOCK_BYTES", BLOCK)
        monkeypatch.setattr(f"tidemill.checkpoint.{module}.CHUNK_BYTES", CHUNK)
    whole = {name: b"".join(pieces) for name, pieces in tensors.items()}
    slots = lay_out({name: ("U8", (len(data),)) for name, data in whole.items()})
    wanted = pack_header(slots, {}) + b"".join(whole[slot.name] for slot in slots)
    path, asked, told, ends = tmp_path / "a", list[str](), list[int](), dict[str, int]()

    def pieces_of(name: str) -> list[memoryview]:
        asked.append(name)
        return [memoryview(piece) for piece in tensors[name]]

    path.unlink(missing_ok=True)
    with passed() as points:
        file = write_tensors(
            path,
            slots,
            pieces_of,
            header=pack_header(slots, {}),
            faults="checkpoint",
            advance=told.append,
            written=lambda name: ends.__setitem__(name, sum(told)),
        )
    assert path.read_bytes() == wanted
    blocks = [wanted[start : start + BLOCK] for start in range(0, len(wanted), BLOCK)]
    assert file.blocks == tuple(map(checksum, blocks)) and told == list(map(len, blocks))
    assert asked == list(ends) == [slot.name for slot in slots]
    start = len(wanted) - (slots[-1].end if slots else 0)
    for slot in slots:  # as soon as it can be, and no sooner
        assert start + slot.end <= ends[slot.name] < start + slot.end + BLOCK
    assert points == ["checkpoint.open", *["checkpoint.write"] * len(blocks), "checkpoint.fsync-file"]
    read = safetensors.numpy.load_file(path)
    assert {name: array.tobytes() for name, array in read.items()} == whole


def aligned(size: int) -> memoryview:
    memory = mmap.mmap(-1, size)
    memory.write(random.Random(size).randbytes(size))
    return memoryview(memory)


def test_large_tensors_that_fill_pages_go_out_as_they_lie_and_others_by_way_of_a_buffer(tmp_path: Path) -> None:
    large, odd = aligned(9 << 20), aligned((9 << 20) + 5)[5:]
    tensors = {
        name: TensorBytes(dtype="U8", shape=(len(data),), data=data) for name, data in {"a": large, "b": odd}.items()
    }
    write(tmp_path / "a", tensors)
    read = TensorFile(tmp_path / "a").tensors()
    assert all(read[name].data == tensor.data for name, tensor in tensors.items())


@pytest.mark.parametrize("pieces", [[b"12345678", b"9"], [b"1234567"], []])
def test_a_tensor_that_gives_other_bytes_than_it_said_is_refused(tmp_path: Path, pieces: list[bytes]) -> None:
    slots = lay_out({"w": ("U8", (8,))})
    with pytest.raises(CheckpointError, match="tensor 'w' gave [+-][0-9]+ bytes beside the 8 it has"):
        write_tensors(
            tmp_path / "a",
            slots,
            lambda name: map(memoryview, pieces),
            header=pack_header(slots, {}),
            faults="checkpoint",
            advance=lambda count: None,
        )


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("action", ["raise", "disk-full"])
def test_a_failure_at_any_block_is_the_callers_and_no_thread_writes_any_more(
    tmp_path: Path, nth: int, action: str
) -> None:
    data = aligned(60 << 20)
    before = threading.active_count()
    with armed(f"checkpoint.write={action}@{nth}"), pytest.raises((FaultInjected, OSError)):
        write(tmp_path / "a", {"w": TensorBytes(dtype="U8", shape=(len(data),), data=data)})
    assert threading.active_count() == before


def test_a_disk_that_is_full_in_the_middle_is_an_os_error_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, real = aligned(60 << 20), os.pwrite

    def full(descriptor: int, view: memoryview, start: int) -> int:
        if start >= 24 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, view, start)

    monkeypatch.setattr(os, "pwrite", full)
    told: list[int] = []
    slots = lay_out({"w": ("U8", (len(data),))})
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        write_tensors(
            tmp_path / "a",
            slots,
            lambda name: (data,),
            header=pack_header(slots, {}),
            faults="checkpoint",
            advance=told.append,
        )
    assert told == [16 << 20] and threading.active_count() == before
