from pathlib import Path

import numpy as np
import pytest

from tidemill.checkpoint.blocks import BLOCK_BYTES
from tidemill.checkpoint.safetensors_file import TensorFile, checksum
from tidemill.checkpoint.shard import LocalShard, write_shard
from tidemill.contracts.checkpoint import Shard, TensorBytes, TensorSpec
from tidemill.errors import CheckpointError
from tidemill.faults import passed


def piece(array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", offset: tuple[int, ...]) -> TensorBytes:
    """Of a tensor of 10 rows."""
    data = memoryview(array.tobytes())
    return TensorBytes(dtype="F32", shape=array.shape, data=data, whole=(10, *array.shape[1:]), offset=offset)


def test_a_shard_is_a_file_of_its_pieces_in_their_own_shapes(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    shard: Shard = LocalShard({"w": piece(rows, (7, 0)), "none": piece(rows[:0], (10, 0))})
    assert shard.specs["w"] == TensorSpec(dtype="F32", shape=(3, 4), whole=(10, 4), offset=(7, 0))
    seen: list[int] = []
    blocks = shard.write(tmp_path / "a", seen.append).blocks
    held = TensorFile(tmp_path / "a").tensors()
    assert bytes(held["w"].data) == rows.tobytes() and held["none"].shape == (0, 4)
    whole = (tmp_path / "a").read_bytes()
    assert blocks == (checksum(whole),) and sum(seen) == len(whole)


def test_each_piece_is_told_of_when_it_is_read_no_more_if_this_was_the_last_file(tmp_path: Path) -> None:
    rows, told = np.zeros((1, BLOCK_BYTES // 4), dtype=np.float32), list[str]()
    shard = LocalShard(
        {name: piece(rows[:, :size], (0, 0)) for name, size in {"a": 8, "b": None, "c": 0}.items()}, told.append
    )
    shard.write(tmp_path / "a", lambda count: None)
    assert told == []
    seen: list[list[str]] = []
    shard.write(tmp_path / "b", lambda count: seen.append(list(told)), last=["a", "b", "c"])
    assert (seen, told) == ([[], ["a"]], ["a", "b", "c"])
    told.clear()
    shard.write(tmp_path / "c", lambda count: None, last=["c", "a"])
    assert told == ["a", "c"]


def test_its_fault_points_are_those_of_a_checkpoint_unless_named(tmp_path: Path) -> None:
    tensors = {"w": piece(np.zeros((1, 2), dtype=np.float32), (0, 0))}
    with passed() as names:
        write_shard(tmp_path / "a", tensors, lambda count: None)
        write_shard(tmp_path / "b", tensors, lambda count: None, faults="other")
    assert list(dict.fromkeys(names[: len(names) // 2])) == [
        "checkpoint.open",
        "checkpoint.write",
        "checkpoint.fsync-file",
    ]
    assert names[-1] == "other.fsync-file"


def test_a_file_that_is_there_and_bytes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong = TensorBytes(dtype="F32", shape=(3,), data=memoryview(bytes(8)))
    with pytest.raises(CheckpointError, match="it has 8 bytes, but shape"):
        write_shard(tmp_path / "a", {"w": wrong}, lambda count: None)
    assert not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match="it has 8 bytes"):
        _ = LocalShard({"w": wrong}).specs
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "a", {}, lambda count: None)
