"""tidemill.checkpoint.placing: pieces in the middle of files, against whole arrays as numpy lays them out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.checkpoint.pieces import Array, counted, grids, in_rows, piece

from tidemill.checkpoint import placing
from tidemill.checkpoint.placing import Pieces, first_difference, place_pieces
from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.checkpoint.shard import LocalShard
from tidemill.contracts.checkpoint import TensorBytes, TensorPlace
from tidemill.faults import passed

GAP = b"other"


def of(tensors: dict[str, TensorBytes]) -> Pieces:
    return {name: (tensor.spec, tensor) for name, tensor in tensors.items()}


def unfilled(path: Path, size: int) -> Path:
    """A file in which bytes that nobody writes can be told."""
    path.write_bytes(GAP + b"\xaa" * size + GAP)
    return path


def filled(path: Path, size: int) -> bytes:
    data = path.read_bytes()
    assert data[: len(GAP)] == data[-len(GAP) :] == GAP and len(data) == size + 2 * len(GAP)
    return data[len(GAP) : -len(GAP)]


def place(path: Path, array: Array, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> list[TensorPlace]:
    return [TensorPlace(path=path, begin=len(GAP), dtype=dtype, shape=array.shape if shape is None else shape)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placing")


@given(grids())
def test_pieces_of_any_grid_make_the_whole_and_each_byte_is_written_once(
    folder: Path, grid: tuple[Array, str, list[TensorBytes]]
) -> None:
    array, dtype, pieces = grid
    path = unfilled(folder / "a", array.nbytes)
    told: list[int] = []
    written = [place_pieces(of({"w": one}), {"w": place(path, array, dtype)}, told.append) for one in pieces]
    assert filled(path, array.nbytes) == array.tobytes()
    assert sum(written) == sum(told) == array.nbytes
    assert not any(first_difference(of({"w": one}), {"w": place(path, array, dtype)}, told.append) for one in pieces)


@given(st.integers(0, 7), st.integers(1, 4))
def test_rows_beyond_the_place_are_left_out_whoever_has_them(folder: Path, rows: int, ranks: int) -> None:
    array = counted((7, 3))
    path = unfilled(folder / "b", array[:rows].nbytes)
    where = {"w": place(path, array, shape=(rows, 3))}
    written = [place_pieces(of({"w": one}), where, lambda count: None) for one in in_rows(array, ranks)]
    assert filled(path, array[:rows].nbytes) == array[:rows].tobytes()
    assert sum(written) == array[:rows].nbytes


@given(grids(), st.data())
def test_a_tensor_cut_into_boxes_has_each_box_where_it_is_told(
    folder: Path, grid: tuple[Array, str, list[TensorBytes]], data: st.DataObject
) -> None:
    """Against numpy: boxes cut along any dimension, each row-major by itself, in any order in the file."""
    array, dtype, pieces = grid
    assume(array.ndim > 0)
    dimension = data.draw(st.integers(0, array.ndim - 1))
    cut = data.draw(st.integers(0, array.shape[dimension]))
    parts = [np.take(array, range(first, end), dimension) for first, end in ((0, cut), (cut, array.shape[dimension]))]
    places, begin = [], len(GAP) + array.nbytes
    for number, part in enumerate(parts):
        begin -= part.nbytes
        start = tuple(cut * number if axis == dimension else 0 for axis in range(array.ndim))
        places.append(TensorPlace(path=folder / "f", begin=begin, dtype=dtype, shape=part.shape, start=start))
    path = unfilled(folder / "f", array.nbytes)
    told: list[str] = []
    for one in pieces:
        place_pieces(of({"w": one}), {"w": places}, lambda count: None, written=told.append)
    assert filled(path, array.nbytes) == parts[1].tobytes() + parts[0].tobytes()
    assert told == ["w"] * len(pieces)
    assert not any(first_difference(of({"w": one}), {"w": places}, lambda count: None) for one in pieces)


@pytest.mark.parametrize("block", [4, 40, 64, 10**6])
def test_blocks_of_any_size_make_the_same_file(folder: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(placing, "_BLOCK", block)
    array = counted((5, 3, 4))
    for offset, shape in [((0, 0, 0), (5, 3, 2)), ((0, 0, 2), (5, 2, 2)), ((0, 2, 2), (5, 1, 2))]:
        path = unfilled(folder / "c", array.nbytes)
        one = piece(array, offset, shape)
        assert place_pieces(of({"w": one}), {"w": place(path, array)}, lambda count: None) == one.nbytes
        wanted = np.frombuffer(b"\xaa" * array.nbytes, dtype=np.float32).reshape(array.shape).copy()
        wanted[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))] = np.frombuffer(
            one.data, dtype=np.float32
        ).reshape(shape)
        assert filled(path, array.nbytes) == wanted.tobytes()


def test_elements_are_cast_as_torch_casts_them(folder: Path) -> None:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    array = values.numpy()
    path = unfilled(folder / "d", array.nbytes // 2)
    for one in (piece(array, (0, 0), (6, 1)), piece(array, (0, 1), (6, 3))):
        place_pieces(of({"w": one}), {"w": place(path, array, "BF16")}, lambda count: None)
    assert filled(path, array.nbytes // 2) == values.bfloat16().view(torch.uint8).numpy().tobytes()


def test_small_tensors_that_follow_each_other_are_one_write_and_cut_columns_one_each(folder: Path) -> None:
    vectors: dict[str, Any] = {f"v{number:03d}": counted((10,)) + number for number in range(100)}
    path = unfilled(folder / "e", 4000)
    places = {
        name: [TensorPlace(path=path, begin=len(GAP) + 40 * number, dtype="F32", shape=(10,))]
        for number, name in enumerate(vectors)
    }
    tensors = {name: piece(array, (0,), (10,)) for name, array in reversed(vectors.items())}
    with passed() as names:
        assert place_pieces(of(tensors), places, lambda count: None) == 4000
    assert names == ["export.write", "export.fsync-file"]
    assert filled(path, 4000) == b"".join(array.tobytes() for array in vectors.values())
    matrix = counted((50, 20))
    with passed() as names:
        place_pieces(of({"w": piece(matrix, (0, 5), (50, 5))}), {"w": place(path, matrix)}, lambda count: None)
    assert names.count("export.write") == 50


def test_a_difference_is_found_in_every_byte_of_ones_own_pieces_and_in_no_other(folder: Path) -> None:
    array = counted((4, 6))
    path = unfilled(folder / "f", array.nbytes)
    mine, other = piece(array, (0, 0), (4, 2)), piece(array, (0, 2), (4, 4))
    where = {"w": place(path, array)}
    for one in (mine, other):
        place_pieces(of({"w": one}), where, lambda count: None)
    whole = path.read_bytes()
    for at in range(len(GAP), len(whole) - len(GAP)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = [first_difference(of({"w": one}), where, lambda count: None) for one in (mine, other)]
        assert sorted(found) == ["", "w"]
        assert found[0] == ("w" if (at - len(GAP)) % 24 < 8 else "")


def test_a_shard_lets_go_of_each_piece_once_and_first_of_what_has_no_place(folder: Path) -> None:
    array, told = counted((4, 6)), list[str]()
    path = unfilled(folder / "g", array.nbytes)
    shard = LocalShard({name: piece(array, (0, 0), (4, 6)) for name in ("moments", "w")}, told.append)
    seen: list[list[str]] = []
    assert shard.place({"w": place(path, array)}, lambda count: None) == array.nbytes and told == []
    shard.place({"w": place(path, array)}, lambda count: seen.append(list(told)), last=True)
    assert told == ["moments", "w"]
    assert shard.differing({"w": place(path, array)}, lambda count: None) == ""


def test_some_of_a_shard_is_a_shard_of_those_alone(tmp_path: Path) -> None:
    array, told = counted((4, 6)), list[str]()
    shard = LocalShard({name: piece(array, (0, 0), (4, 6)) for name in "abc"}, told.append).some(["b", "z"])
    assert list(shard.specs) == ["b"]
    shard.write(tmp_path / "b", lambda count: None, last=["b"])
    assert TensorFile(tmp_path / "b").tensors().keys() == {"b"} and told == []


def test_who_is_told_may_stop_it(folder: Path) -> None:
    array = counted((4, 6))
    path = unfilled(folder / "h", array.nbytes)

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place_pieces(of({"w": piece(array, (0, 0), (4, 6))}), {"w": place(path, array)}, stop)
    with pytest.raises(FileNotFoundError):
        place_pieces(of({"w": piece(array, (0, 0), (4, 6))}), {"w": place(folder / "none", array)}, stop)
