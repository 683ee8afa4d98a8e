import os
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.pieces import shards_of

from tidemill.checkpoint.catalog import newest
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import read_checkpoint
from tidemill.contracts.checkpoint import Snapshot, TensorBytes, WrittenFile
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError
from tidemill.faults import armed, passed

STATE = RunState(step=4, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())


def committer(folder: Path, **options: Any) -> Committer:
    folder.mkdir(exist_ok=True)
    defaults: dict[str, Any] = {"attempt": 1, "identity": {}, "settings": {}, "retention": {}}
    return Committer(folder=folder, **defaults | options)


def snapshots(fill: bytes = b"abcd") -> dict[str, Snapshot]:
    tensor = TensorBytes(dtype="F32", shape=(1000,), data=memoryview(fill * 1000))
    return {"trainer": Snapshot(tensors={"model/w": tensor}), "data": Snapshot(extra={"x": 1})}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def nothing(count: int) -> None:
    """Progress that nobody follows."""


def points(folder: Path) -> list[str]:
    with passed() as names:
        committer(folder).commit(stage(STATE, snapshots()), nothing)
    return names


def test_everything_is_fsynced_before_the_rename_and_the_parent_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    committer(tmp_path / "c").commit(stage(STATE, snapshots()), nothing)
    work = "step-00000004.1.tmp"
    assert synced == ["trainer-00000-of-00001.safetensors", "state.json", "manifest.json", work, "c"]


def test_the_manifest_is_the_last_file_and_the_acknowledgement_the_last_point(tmp_path: Path) -> None:
    names = points(tmp_path / "c")
    order = ["checkpoint.fsync-file", "checkpoint.fsync-state", "checkpoint.manifest", "checkpoint.fsync-manifest"]
    order += ["checkpoint.fsync-attempt", "checkpoint.rename", "checkpoint.fsync-parent", "checkpoint.acknowledged"]
    assert [name for name in names if name in order] == order


def test_whatever_fails_at_any_point_leaves_the_older_ones_and_nothing_else(tmp_path: Path) -> None:
    names = points(tmp_path / "probe")
    folder = tmp_path / "c"
    committer(folder).commit(stage(RunState(**vars(STATE) | {"step": 2}), snapshots()), nothing)
    for action, error in (("disk-full", CheckpointError), ("raise", Exception)):
        for index, name in enumerate(names):
            nth = names[: index + 1].count(name)
            with armed(f"{name}={action}@{nth}"), pytest.raises(error) as raised:
                committer(folder).commit(stage(STATE, snapshots()), nothing)
            assert names_in(folder) == ["step-00000002"], f"{name}@{nth} {action}"
            if action == "disk-full":
                assert str(folder) in str(raised.value) and "it needs 1.0 MiB" in str(raised.value)
    stored, rejected = newest(folder)
    assert stored is not None and stored.state.step == 2 and not rejected
    committer(folder).commit(stage(STATE, snapshots()), nothing)


def test_a_file_size_limit_in_the_middle_is_told_of_as_one(tmp_path: Path) -> None:
    import resource
    import signal

    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, old[1]))
        with pytest.raises(CheckpointError, match="may not become so large"):
            committer(tmp_path / "c").commit(stage(STATE, snapshots()), nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert names_in(tmp_path / "c") == []


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    small = committer(tmp_path / "c", free=lambda folder: 1000)
    with passed() as names, pytest.raises(CheckpointError, match=r"it needs 1\.0 MiB .* 1000 B are free there"):
        small.commit(stage(STATE, snapshots()), nothing)
    assert names == []


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "dangling link"])
def test_an_occupied_name_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    final = tmp_path / "c" / "step-00000004"
    final.parent.mkdir()
    match kind:
        case "folder":
            (final / "inner").mkdir(parents=True)
        case "empty folder":
            final.mkdir()
        case "file":
            final.write_text("mine")
        case _:
            final.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="is there already"):
        committer(tmp_path / "c").commit(stage(STATE, snapshots()), nothing)
    assert names_in(tmp_path / "c") == ["step-00000004"]


def test_an_attempt_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rmtree(path: Path) -> None:
        calls.append(str(path))
        if len(calls) > 1:
            raise PermissionError("held open elsewhere")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with (
        armed("checkpoint.manifest=disk-full"),
        pytest.raises(CheckpointError, match=r"still in .*step-00000004.1.tmp"),
    ):
        committer(tmp_path / "c").commit(stage(STATE, snapshots()), nothing)


def test_an_extra_that_is_not_json_is_named_by_part() -> None:
    with pytest.raises(CheckpointError, match="the part data: its `extra` is not JSON"):
        stage(STATE, {"data": Snapshot(extra={"x": threading.Lock()})})


def test_settings_that_are_not_json_are_found_in_the_rehearsal(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot save the settings"):
        committer(tmp_path / "c", settings={"path": tmp_path}).rehearse(stage(STATE, snapshots()))


def test_staged_bytes_are_what_the_files_take(tmp_path: Path) -> None:
    staged = stage(STATE, snapshots())
    path = committer(tmp_path / "c").commit(staged, nothing)
    assert sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json") == staged.total_bytes


def test_no_handle_is_left_open_by_a_failed_save(tmp_path: Path) -> None:
    before = len(names_in(Path("/proc/self/fd")))
    for name in ("checkpoint.write", "checkpoint.fsync-file", "checkpoint.fsync-state", "checkpoint.fsync-manifest"):
        with armed(f"{name}=disk-full"), pytest.raises(CheckpointError):
            committer(tmp_path / "c").commit(stage(STATE, snapshots()), nothing)
    assert len(names_in(Path("/proc/self/fd"))) == before


def in_ranks(count: int = 3) -> dict[str, Snapshot]:
    array = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    return {"trainer": Snapshot(shards=shards_of({"model/w": array}, count)), "data": Snapshot(extra={"x": 1})}


def test_shards_are_read_back_as_whole_tensors(tmp_path: Path) -> None:
    path = committer(tmp_path / "c").commit(stage(STATE, in_ranks()), nothing)
    wanted = ["manifest.json", "state.json", *(f"trainer-{rank:05d}-of-00003.safetensors" for rank in range(3))]
    assert names_in(path) == wanted
    tensor = read_checkpoint(path, step=4).parts["trainer"].tensors["model/w"]
    assert tensor.shape == (1000, 3) and bytes(tensor.data) == np.arange(3000, dtype=np.float32).tobytes()


def test_whatever_fails_in_one_of_several_shards_leaves_nothing(tmp_path: Path) -> None:
    with passed() as names:
        committer(tmp_path / "probe").commit(stage(STATE, in_ranks()), nothing)
    counts = {name: names.count(name) for name in names}
    assert counts["checkpoint.open"] == counts["checkpoint.fsync-file"] == 3
    before = threading.active_count()
    for action, error in (("disk-full", CheckpointError), ("raise", Exception)):
        for name, count in counts.items():
            for nth in range(1, count + 1):
                with armed(f"{name}={action}@{nth}"), pytest.raises(error):
                    committer(tmp_path / "c").commit(stage(STATE, in_ranks()), nothing)
                assert names_in(tmp_path / "c") == [], f"{name}@{nth} {action}"
    assert threading.active_count() == before


def test_what_advance_raises_ends_every_shard(tmp_path: Path) -> None:
    told: list[int] = []

    def advance(count: int) -> None:
        told.append(count)
        if len(told) == 2:
            raise RuntimeError("nobody waits any more")

    with pytest.raises(RuntimeError, match="nobody waits any more"):
        committer(tmp_path / "c").commit(stage(STATE, in_ranks()), advance)
    assert names_in(tmp_path / "c") == []


class Odd(LocalShard):
    """A shard that does something else than it says."""

    def __init__(self, shard: LocalShard, write: Callable[[Path, LocalShard], WrittenFile]) -> None:
        super().__init__(shard._tensors)
        self._shard, self._write = shard, write

    def write(self, path: Path, advance: Callable[[int], None], *, last: Collection[str] = ()) -> WrittenFile:
        return self._write(path, self._shard)


def elsewhere(path: Path, shard: LocalShard) -> WrittenFile:
    (path.parents[2] / "elsewhere").mkdir(exist_ok=True)
    return shard.write(path.parents[2] / "elsewhere" / path.name, nothing)


def cut_short(path: Path, shard: LocalShard) -> WrittenFile:
    sums = shard.write(path, nothing)
    os.truncate(path, 4100)
    return sums


def of_other_tensors(path: Path, shard: LocalShard) -> WrittenFile:
    renamed = LocalShard({name.replace("w", "v"): tensor for name, tensor in shard._tensors.items()})
    return renamed.write(path, nothing)


def of_fewer_blocks(path: Path, shard: LocalShard) -> WrittenFile:
    return replace(shard.write(path, nothing), blocks=())


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (elsewhere, "was written, but .* does not hold it here: .* every host of the run shares"),
        (cut_short, r"was written, but has 4100 of \d+ bytes here"),
        (of_other_tensors, "was written with other tensors"),
        (of_fewer_blocks, "was written with other tensors"),
    ],
)
def test_a_shard_that_is_not_here_as_it_should_be_is_never_committed(
    tmp_path: Path, write: Callable[[Path, LocalShard], WrittenFile], said: str
) -> None:
    good = in_ranks()["trainer"].shards
    shards = [good[0], Odd(good[1], write), good[2]]  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"trainer-00001-of-00003.safetensors {said}"):
        committer(tmp_path / "c").commit(stage(STATE, {"trainer": Snapshot(shards=shards)}), nothing)
    assert names_in(tmp_path / "c") == []
