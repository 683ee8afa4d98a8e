"""tidemill.checkpoint.landing and tidemill.contracts.landing: where bytes of files belong, told while they are read."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.pieces import counted, piece

from tidemill.checkpoint.blocks import BLOCK_BYTES
from tidemill.checkpoint.landing import LandingFile
from tidemill.checkpoint.manifest import FileEntry, Slice, Slices
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.verify import file_problems
from tidemill.contracts.checkpoint import HeldTensor, Saved, Snapshot
from tidemill.contracts.landing import NOWHERE
from tidemill.contracts.state import Cursor, RunState

MIB = 1 << 20


class Ground:
    """Keeps all that lands, by tensor and place."""

    def __init__(self) -> None:
        self.pieces: dict[str, dict[int, bytes]] = {}

    def land(self, name: str, start: int, data: memoryview) -> None:
        assert start not in self.pieces.setdefault(name, {})
        self.pieces[name][start] = bytes(data)

    def whole(self, name: str) -> bytes:
        """Of pieces that follow each other."""
        found, reached = self.pieces[name], 0
        for start in sorted(found):
            assert start == reached
            reached += len(found[start])
        return b"".join(found[start] for start in sorted(found))


def files(folder: Path, shards: list[dict[str, HeldTensor]]) -> list[FileEntry]:
    """Written, one a shard."""
    state = RunState(step=1, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    staged = stage(state, {"trainer": Snapshot(shards=[LocalShard(shard) for shard in shards])})
    return [file.entry(file.shard.write(folder / file.name, lambda count: None).blocks) for file in staged.files]


def test_what_is_verified_lands_where_it_belongs_however_tensors_are_cut_into_rows_and_files(tmp_path: Path) -> None:
    large, small = counted((3 * MIB, 4), "F32"), counted((7, 3), "I64")
    cut, rows = 2 * MIB + 5, 3 * MIB
    first = {"large": piece(large, (0, 0), (cut, 4), "F32"), "small": piece(small, (0, 0), (7, 3), "I64")}
    last = {"large": piece(large, (cut, 0), (rows - cut, 4), "F32"), "empty": piece(large[:0], (0, 0), (0, 4), "F32")}
    entries = files(tmp_path, [first, last])
    ground = Ground()
    assert file_problems(tmp_path, entries, lambda count: None, {"trainer": ground}) == []
    assert set(ground.pieces) == {"large", "small"}
    assert ground.whole("large") == large.tobytes() and ground.whole("small") == small.tobytes()
    assert entries[0].bytes > BLOCK_BYTES


def test_pieces_that_are_no_stretch_of_their_tensor_do_not_land(tmp_path: Path) -> None:
    array = counted((6, 4), "F32")
    left, right = piece(array, (0, 0), (6, 2), "F32"), piece(array, (0, 2), (6, 2), "F32")
    ground = Ground()
    assert file_problems(tmp_path, files(tmp_path, [{"w": left}, {"w": right}]), int, {"trainer": ground}) == []
    assert ground.pieces == {}


def test_damaged_bytes_may_land_and_are_told_of_nevertheless(tmp_path: Path) -> None:
    (entry,) = files(tmp_path, [{"w": piece(counted((9,), "F32"), (0,), (9,), "F32")}])
    path = tmp_path / entry.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (problem,) = file_problems(tmp_path, [entry], lambda count: None, {"trainer": Ground()})
    assert "the checksum of w in bytes" in problem


def test_files_of_other_parts_and_those_of_the_first_format_do_not_land(tmp_path: Path) -> None:
    (entry,) = files(tmp_path, [{"w": piece(counted((9,), "F32"), (0,), (9,), "F32")}])
    ground = Ground()
    assert file_problems(tmp_path, [entry], lambda count: None, {"critic": ground}) == []
    file_problems(tmp_path, [replace(entry, blocks=())], lambda count: None, {"trainer": ground})
    assert ground.pieces == {}


def test_a_slice_that_cannot_be_true_is_left_out() -> None:
    fields = {"name": "w", "dtype": "F32", "global_shape": (4,), "offset": (0,), "local_shape": (4,)}
    for told in (
        {"begin": 0, "end": 20},
        {"begin": 0, "end": 0},
        {"begin": 0, "end": 16, "global_shape": (4, 4)},
        {"begin": 0, "end": 16, "global_shape": (2, 2), "offset": ()},
    ):
        ground = Ground()
        entry = FileEntry("f", "trainer", 4096, "", Slices([Slice(**{**fields, **told})]))
        LandingFile(entry, ground).seen(0, memoryview(bytes(4096)))
        assert ground.pieces == {}


def test_nowhere_keeps_nothing_and_is_where_a_checkpoint_lands_unless_somebody_has_room() -> None:
    NOWHERE.land("w", 0, memoryview(b"abc"))
    assert Saved(tensors={}, extra={}).landing is NOWHERE


@pytest.mark.parametrize("step", [1, 77, 4096])
def test_bytes_that_come_in_any_pieces_and_order_land_once(step: int) -> None:
    data = np.random.default_rng(5).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    cuts = [100, 100, 900, 4000, 4999, 5000]
    slices = [
        Slice(f"t{number}", "U8", (end - begin,), (0,), (end - begin,), begin, end)
        for number, (begin, end) in enumerate(itertools.pairwise(cuts))
    ]
    ground = Ground()
    file = LandingFile(FileEntry("f", "trainer", 5000, "", Slices(slices[::-1])), ground)
    for begin in reversed(range(0, 5000, step)):
        file.seen(begin, memoryview(data)[begin : begin + step])
    found = {name: ground.whole(name) for name in ground.pieces}
    assert found == {one.name: data[one.begin : one.end] for one in slices if one.begin < one.end}
