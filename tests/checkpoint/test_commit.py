import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.catalog import newest
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.staged import stage
from tidemill.contracts.checkpoint import Snapshot, TensorBytes
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


def test_a_file_size_limit_in_the_middle_is_a_full_disk(tmp_path: Path) -> None:
    import resource
    import signal

    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, old[1]))
        with pytest.raises(CheckpointError, match="the disk is full"):
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
