"""Random tensors cut into random grids, saved as shards, read back by random boxes, compared with numpy."""

import pickle
import tempfile
import tracemalloc
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.pieces import Array, boxes, counted, cut, grids, in_rows, piece

from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import read_checkpoint
from tidemill.checkpoint.stored_tensor import FilePiece, StoredTensor
from tidemill.contracts.checkpoint import SavedTensor, Snapshot, TensorBytes
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError

STEPS = count(1)


def saved(folder: Path, pieces: list[TensorBytes]) -> SavedTensor:
    """Through a whole checkpoint: a shard for each piece, and the tensor back."""
    held = [LocalShard({"w": one}) for one in pieces]
    step = next(STEPS)
    state = RunState(step=step, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    committer = Committer(folder=folder, attempt=1, identity={}, settings={}, retention={})
    path = committer.commit(stage(state, {"trainer": Snapshot(shards=held)}), lambda amount: None)
    return read_checkpoint(path, step=step).parts["trainer"].tensors["w"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(grids(), st.data())
def test_any_box_of_any_grid_is_what_numpy_cuts(
    grid: tuple[Array, str, list[TensorBytes]], data: st.DataObject
) -> None:
    array, dtype, pieces = grid
    with tempfile.TemporaryDirectory() as folder:
        tensor = saved(Path(folder), pieces)
        sent: SavedTensor = pickle.loads(pickle.dumps(tensor))
        for held in (tensor, sent):
            assert (held.dtype, held.shape, bytes(held.data)) == (dtype, array.shape, array.tobytes())
        for _ in range(5):
            offset, shape = data.draw(boxes(array.shape))
            assert bytes(sent.read(offset, shape)) == cut(array, offset, shape)


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def one_file(path: Path, pieces: list[TensorBytes], whole: tuple[int, ...]) -> StoredTensor:
    """Pieces one after another in a file, as nothing but their bytes."""
    found, data = [], b""
    for one in pieces:
        begin = len(data)
        data += bytes(one.data)
        offset = one.spec.offset
        found.append(FilePiece(path=path, begin=begin, end=len(data), offset=offset, shape=one.shape))
    path.write_bytes(data)
    return StoredTensor(dtype="F32", shape=whole, pieces=tuple(found))


def test_one_stretch_of_one_piece_is_no_copy_and_all_else_is_one_new_buffer(tmp_path: Path) -> None:
    array = counted((8, 4, 2))
    tensor = one_file(tmp_path / "f", in_rows(array, 2), array.shape)
    stretches = [((0, 0, 0), (4, 4, 2)), ((5, 0, 0), (2, 4, 2)), ((1, 2, 0), (1, 2, 2)), ((7, 3, 1), (1, 1, 1))]
    for offset, shape in stretches:
        view = tensor.read(offset, shape)
        assert view.readonly and bytes(view) == cut(array, offset, shape)  # mapped, and so read-only
    for offset, shape in [((3, 0, 0), (2, 4, 2)), ((0, 1, 0), (2, 2, 2)), ((0, 0, 1), (8, 4, 1))]:
        view = tensor.read(offset, shape)
        assert not view.readonly and bytes(view) == cut(array, offset, shape)


def test_reading_boxes_takes_the_room_of_a_box_and_a_whole_mapped_piece_takes_none(tmp_path: Path) -> None:
    array = counted((4096, 512))  # 8 MiB
    tensor = one_file(tmp_path / "f", in_rows(array, 4), array.shape)
    column = one_file(
        tmp_path / "g", [piece(array, (0, 0), (4096, 256)), piece(array, (0, 256), (4096, 256))], array.shape
    )
    tracemalloc.start()
    try:
        for first in range(0, 4096, 128):  # across pieces of rows; 256 KiB each
            assert tensor.read((max(0, first - 64), 0), (128, 512)).nbytes == 128 * 2048
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.reset_peak()
        for first in range(0, 512, 32):  # columns: many short stretches; 512 KiB each
            assert column.read((0, max(0, first - 16)), (4096, 32)).nbytes == 4096 * 128
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
        tracemalloc.reset_peak()
        assert tensor.read((1024, 0), (1024, 512)).nbytes == 2 << 20
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
        tracemalloc.reset_peak()
        assert tensor.data.nbytes == array.nbytes
        assert tracemalloc.get_traced_memory()[1] < array.nbytes + (64 << 10)
    finally:
        tracemalloc.stop()


def test_what_is_sent_is_where_it_lies_and_handles_do_not_stay_open(tmp_path: Path) -> None:
    array = counted((1000, 100))
    tensor = one_file(tmp_path / "f", in_rows(array, 8), array.shape)
    assert len(pickle.dumps(tensor)) < 2000
    before = handles()
    views = [tensor.read((row, 0), (1, 100)) for row in range(100)]
    assert np.frombuffer(views[99], dtype=np.float32)[0] == 9900.0
    assert handles() <= before + 1
    del views
    assert handles() == before


def test_a_file_that_took_the_name_of_one_in_use_is_read_itself(tmp_path: Path) -> None:
    first, second = counted((8, 4)), counted((8, 4)) + 1
    held = one_file(tmp_path / "f", in_rows(first, 2), (8, 4)).read((0, 0), (1, 4))
    (tmp_path / "f").rename(tmp_path / "aside")
    assert bytes(one_file(tmp_path / "f", in_rows(second, 2), (8, 4)).data) == second.tobytes()
    assert bytes(held) == first[:1].tobytes()


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((0,), (2,)), ((0, 0), (9, 1)), ((-1, 0), (1, 1)), ((8, 4), (1, 1)), ((0, 0), (-1, 1)), ((0, 0), (1,))],
)
def test_a_box_that_is_not_inside_is_refused(tmp_path: Path, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    tensor = one_file(tmp_path / "f", in_rows(counted((8, 4)), 2), (8, 4))
    with pytest.raises(CheckpointError, match=r"cannot read the box of shape"):
        tensor.read(offset, shape)


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_file_that_is_not_there_where_it_is_read_is_named(tmp_path: Path, damage: str) -> None:
    tensor = one_file(tmp_path / "f", in_rows(counted((8, 4)), 2), (8, 4))
    if damage == "gone":
        (tmp_path / "f").unlink()
    else:
        (tmp_path / "f").write_bytes(b"1234")
    with pytest.raises(
        CheckpointError, match=r"cannot read .*/f, which was whole when .* every host of the run shares"
    ):
        _ = tensor.data
