"""tidemill.cluster.snapshot_desk and tidemill.cluster.remote_shard: one process writes files, another looks on."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill import faults
from tidemill.checkpoint.safetensors_file import TensorFile, checksum
from tidemill.cluster.remote_shard import RemoteShard
from tidemill.cluster.snapshot_desk import SnapshotDesk
from tidemill.contracts.checkpoint import Places, Shard, Snapshot, TensorBytes, TensorPlace
from tidemill.contracts.events import Emit
from tidemill.contracts.workers import Place
from tidemill.errors import CheckpointError, WorkerError
from tidemill.testing.spawned import SpawnedGroup

MIB = 1 << 20


def piece(mebibytes: int = 1) -> TensorBytes:
    data = np.arange(mebibytes * MIB // 8, dtype=np.int64).tobytes()
    shape = (mebibytes * MIB // 8,)
    return TensorBytes(dtype="I64", shape=shape, data=memoryview(data), whole=(2 * shape[0],), offset=(0,))


class DeskService:
    """A desk with one snapshot, number 0, of 40 MiB, which is three blocks of a file; and a call that takes a while."""

    def __init__(self, place: Place, emit: Emit) -> None:
        self.desk = SnapshotDesk()
        self.releases = 0
        self.desk.hold(0, Snapshot(tensors={"w": piece(40)}, release=self._release))
        self.write_shard, self.shard_state = self.desk.write, self.desk.state
        self.place_shard, self.compare_shard = self.desk.place, self.desk.compare
        self.abandon_shard, self.release_snapshot = self.desk.abandon, self.desk.release

    def _release(self) -> None:
        self.releases += 1

    def released(self) -> int:
        return self.releases

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Desks:
    """Makes a remote shard of a worker's snapshot; `group` is that worker."""

    def __init__(self) -> None:
        self.groups: list[SpawnedGroup] = []

    def __call__(self, faults: str = "") -> Shard:
        self.groups.append(SpawnedGroup("trainer", 1, fault_text=faults))
        self.group.build(DeskService, meet=False)
        return RemoteShard(self.group, worker=0, token=0, specs={"w": piece(40).spec}, deadline=10.0)

    @property
    def group(self) -> SpawnedGroup:
        return self.groups[-1]

    def control(self, method: str, *arguments: Any) -> Any:
        return self.group.control(0, method, *arguments, deadline=10.0)


@pytest.fixture
def desks() -> Iterator[Desks]:
    made = Desks()
    yield made
    for group in made.groups:
        group.close()


def settled(desk: SnapshotDesk, token: int) -> Any:
    while not desk.state(token).ended:
        time.sleep(0.005)
    return desk.state(token)


def test_a_shard_is_written_by_the_worker_and_told_of_as_it_grows(desks: Desks, tmp_path: Path) -> None:
    shard, told, path = desks(), [], tmp_path / "a.safetensors"
    blocks = shard.write(path, told.append).blocks
    held = TensorFile(path).tensors()["w"]
    assert bytes(held.data) == bytes(piece(40).data)
    whole = path.read_bytes()
    assert blocks == (checksum(whole[: 16 * MIB]), checksum(whole[16 * MIB : 32 * MIB]), checksum(whole[32 * MIB :]))
    assert sum(told) == len(whole) == 40 * MIB + 4096


def test_a_shard_is_written_beside_the_call_under_way(desks: Desks, tmp_path: Path) -> None:
    shard = desks()
    slow = desks.group.start(0, "wait", 3.0)
    shard.write(tmp_path / "a.safetensors", lambda count: None)
    assert not slow.done()


def test_a_full_disk_of_the_worker_is_an_os_error_of_the_driver(desks: Desks, tmp_path: Path) -> None:
    shard = desks("trainer-0/checkpoint.write=disk-full@2")
    with pytest.raises(OSError) as caught:
        shard.write(tmp_path / "a.safetensors", lambda count: None)
    assert caught.value.errno == errno.ENOSPC
    assert "in trainer-0" in caught.value.__notes__[0]
    shard.write(tmp_path / "b.safetensors", lambda count: None)


def test_a_path_that_is_taken_is_refused_as_here(desks: Desks, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(FileExistsError):
        desks().write(tmp_path / "a.safetensors", lambda count: None)


def test_when_advance_raises_the_worker_has_let_go_of_the_file(desks: Desks, tmp_path: Path) -> None:
    shard = desks("trainer-0/checkpoint.write=delay:0.5@3")

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shard.write(tmp_path / "a.safetensors", stop)
    state = desks.control("shard_state", 0)
    assert state.ended
    assert state.failure is not None
    assert "waits for this file no more" in state.failure.text
    shard.write(tmp_path / "b.safetensors", lambda count: None)


def test_advance_is_told_of_no_progress_too_so_that_a_disk_that_hangs_can_be_left(desks: Desks, tmp_path: Path) -> None:
    shard = desks("trainer-0/checkpoint.write=delay:3@2")
    calls: list[int] = []

    def stop(count: int) -> None:
        calls.append(count)
        if len(calls) == 3:
            raise TimeoutError("long enough")

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="long enough"):
        shard.write(tmp_path / "a.safetensors", stop)
    assert calls == [0, 0, 0]
    assert 2.5 < time.monotonic() - began < 6  # it waited for the worker to let go


def test_a_long_write_is_looked_at_a_few_times_a_second(
    desks: Desks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = desks("trainer-0/checkpoint.write=delay:1.2@2")
    looks = []
    ask = desks.group.control

    def control(worker: int, method: str, *arguments: Any, deadline: float) -> Any:
        looks.append(method)
        return ask(worker, method, *arguments, deadline=deadline)

    monkeypatch.setattr(desks.group, "control", control)
    shard.write(tmp_path / "a.safetensors", lambda count: None)
    assert 8 < looks.count("shard_state") < 16


def test_a_worker_that_dies_while_it_writes_is_named(desks: Desks, tmp_path: Path) -> None:
    shard = desks("trainer-0/checkpoint.write=kill@3")
    with pytest.raises(WorkerError, match="trainer-0 died"):
        shard.write(tmp_path / "a.safetensors", lambda count: None)


def test_a_snapshot_released_while_it_is_written_is_let_go_of_afterwards(desks: Desks, tmp_path: Path) -> None:
    desks("trainer-0/checkpoint.write=delay:0.5@2")
    desks.control("write_shard", 0, tmp_path / "a.safetensors", [], ["w"])
    for _ in range(2):
        desks.control("release_snapshot", 0)
    assert desks.control("released") == 0
    ends = time.monotonic() + 5
    while not desks.control("released") and time.monotonic() < ends:
        time.sleep(0.02)
    assert desks.control("released") == 1
    with pytest.raises(CheckpointError, match="released"):
        desks.control("shard_state", 0)


def test_two_files_of_one_snapshot_come_one_after_the_other(tmp_path: Path) -> None:
    desk = SnapshotDesk()
    desk.hold(7, Snapshot(tensors={"w": piece()}))
    with faults.armed("checkpoint.write=delay:0.2"):
        desk.write(7, tmp_path / "a", [], ["w"])
        with pytest.raises(CheckpointError, match="another file"):
            desk.write(7, tmp_path / "b", [], ["w"])
        assert settled(desk, 7).failure is None
    desk.write(7, tmp_path / "b", [], ["w"])
    assert settled(desk, 7).value.blocks == (checksum((tmp_path / "b").read_bytes()),)


def test_pieces_of_the_last_file_are_let_go_of_as_they_are_written_and_those_of_others_are_not(tmp_path: Path) -> None:
    desk, told = SnapshotDesk(), list[str]()
    desk.hold(7, Snapshot(tensors={"v": piece(), "w": piece()}, written=told.append))
    for name, last in {"a": [], "b": ["v", "w"]}.items():
        assert told == []
        desk.write(7, tmp_path / name, last, ["v", "w"])
        assert settled(desk, 7).failure is None
    assert told == ["v", "w"]


def test_two_snapshots_are_held_and_released_by_number() -> None:
    desk, released = SnapshotDesk(), []
    for token in (1, 2):
        desk.hold(token, Snapshot(release=lambda token=token: released.append(token)))  # type: ignore[misc]
    desk.release(1)
    desk.release(1)
    desk.release(99)
    assert released == [1]
    desk.release(2)
    assert released == [1, 2]


class Deadly:
    """A tensor that ends who reads it."""

    spec, dtype, shape, nbytes = piece().spec, "I64", (MIB // 8,), MIB

    @property
    def data(self) -> memoryview:
        raise SystemExit(1)

    def pieces(self) -> Iterator[memoryview]:
        raise SystemExit(1)


@pytest.mark.parametrize("released_meanwhile", [False, True])
def test_a_writer_that_is_ended_by_more_than_an_error_says_so_and_lets_go(
    tmp_path: Path, released_meanwhile: bool
) -> None:
    desk, releases = SnapshotDesk(), list[int]()
    desk.hold(1, Snapshot(tensors={"w": Deadly()}, release=lambda: releases.append(1)))  # type: ignore[dict-item]
    with faults.armed("checkpoint.write=delay:0.2"):
        desk.write(1, tmp_path / "a", [], ["w"])
        if released_meanwhile:
            desk.release(1)
        else:
            state = settled(desk, 1)
            assert isinstance(state.failure.error, CheckpointError)
            assert "the thread that wrote it was ended by SystemExit" in state.failure.text
            desk.release(1)
        ends = time.monotonic() + 5
        while not releases and time.monotonic() < ends:
            time.sleep(0.005)
    assert releases == [1]


def place_of(path: Path) -> Places:
    """Of the whole, of which the piece is the first half."""
    return {"w": [TensorPlace(path=path, begin=8, dtype="I64", shape=piece(40).spec.whole)]}


def test_a_shards_pieces_are_placed_in_a_file_and_compared_by_the_worker(desks: Desks, tmp_path: Path) -> None:
    shard, told, path = desks(), list[int](), tmp_path / "a"
    path.write_bytes(bytes(8 + 80 * MIB))
    assert shard.place(place_of(path), told.append) == sum(told) == 40 * MIB
    assert path.read_bytes() == bytes(8) + bytes(piece(40).data) + bytes(40 * MIB)
    assert shard.differing(place_of(path), told.append) == ""
    with path.open("r+b") as file:
        file.seek(8 + 5 * MIB)
        file.write(b"\xff" * 8)
    assert shard.differing(place_of(path), told.append) == "w"
    assert shard.some([]).specs == {} and len(shard.some(["w"]).write(tmp_path / "b", told.append).blocks) == 3
    with pytest.raises(FileNotFoundError, match="trainer-0"):
        shard.place(place_of(tmp_path / "gone"), told.append)


def test_a_worker_that_dies_while_it_places_its_pieces_is_named(desks: Desks, tmp_path: Path) -> None:
    shard, path = desks("trainer-0/export.write=kill@2"), tmp_path / "a"
    path.write_bytes(bytes(8 + 80 * MIB))
    with pytest.raises(WorkerError, match="trainer-0 died"):
        shard.place(place_of(path), lambda count: None)
