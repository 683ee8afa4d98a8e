import struct
from pathlib import Path

import numpy
import pytest
import safetensors
import safetensors.numpy
import xxhash

from tidemill.checkpoint.safetensors_file import TensorFile, checksum, file_size, slots_of, write_tensors
from tidemill.contracts.checkpoint import TensorBytes, WrittenFile
from tidemill.errors import CheckpointError

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
        metadata={"format": "pt"},
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
