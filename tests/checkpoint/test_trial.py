"""A save in small before the first step (`checkpoint.trial`), and exports beside saves, as the manager has them.

Modules: tidemill.checkpoint.trial, tidemill.checkpoint.rehearsal.
"""

import errno
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint import trial
from tidemill.checkpoint.catalog import entries
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.exports import NoExports
from tidemill.checkpoint.staged import Staged, stage
from tidemill.contracts.checkpoint import Snapshot, TensorBytes
from tidemill.contracts.events import CheckpointEvent, Notice
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError, WorkerError
from tidemill.faults import armed, calling, passed

MakeRig = Callable[..., Any]
STATE = RunState(step=3, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())


class Killed(BaseException):
    """As after SIGKILL: nobody handles it, though unlike there what is unwinding clears away."""


class FakeExports(NoExports):
    """Exports every fourth step, into memory."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.tried = 0
        self.fails = ""
        self.saved_before: list[bool] = []
        self.look: Callable[[Staged], None] = lambda staged: None

    def due(self, step: int) -> bool:
        return step > 0 and step % 4 == 0

    def has(self, step: int) -> bool:
        return step in self.done

    def beside(self, staged: Staged, advance: Callable[[int], None]) -> None:
        if not self.due(staged.step):
            return
        self.look(staged)
        advance(1)
        if self.fails:
            raise CheckpointError(self.fails)
        self.done.append(staged.step)

    def attempt(self, snapshots: Iterable[Snapshot]) -> None:
        self.tried += 1


@pytest.fixture(params=[0, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    """All of it in one process, and with a trainer whose ranks write for themselves."""
    count: int = request.param
    return count


def test_a_trial_writes_reads_and_removes_every_kind_of_file_at_a_fresh_start_and_at_a_resume(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    exports = FakeExports()
    with passed() as names:
        rig = make_rig(trial=True, exports=exports)
        assert rig.restore() is None
    assert {"checkpoint.write", "checkpoint.fsync-file", "checkpoint.fsync-state", "checkpoint.rename"} <= set(names)
    assert rig.statuses("durable") == rig.statuses("staged") == []
    assert rig.names() == [] and exports.tried == 1 and rig.trainer.held == 0
    rig.run(4)
    again = make_rig(trial=True, exports=exports, attempt=2)
    again.restore()
    assert again.is_at(4) and exports.tried == 2 and again.names() == ["step-00000002", "step-00000004"]
    with passed() as names:
        make_rig(tmp_path / "without", trial=False).restore()
    assert "checkpoint.write" not in names


def test_whatever_a_trial_is_killed_at_nothing_is_left_that_anybody_reads(make_rig: MakeRig, tmp_path: Path) -> None:
    with passed() as names:
        make_rig(tmp_path / "whole", trial=True).restore()
    seen: list[int] = []

    def look(folder: Path) -> None:
        seen.append(len(entries(folder)))

    for name in sorted(set(names)):
        folder = tmp_path / name
        rig = make_rig(folder, trial=True)
        with calling(name, lambda folder=folder: look(folder)):
            rig.restore()
    assert len(seen) > 5 and set(seen) == {0}
    left = tmp_path / "left"
    make_rig(left)
    for name in ("step-00000000.1.tmp", "step-00000000.1-1.tmp"):
        (left / name).mkdir()
        (left / name / "manifest.json").write_text("{}")
    rig = make_rig(left, trial=True, attempt=2)
    assert rig.restore() is None and rig.names() == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("checkpoint.write=disk-full", r"cannot save step 0 in .*the disk is full"),
        ("checkpoint.rename=disk-full", r"cannot save step 0 in .*the disk is full"),
    ],
)
def test_a_trial_that_fails_ends_the_start_and_leaves_nothing(make_rig: MakeRig, fault: str, said: str) -> None:
    rig = make_rig(trial=True)
    with armed(fault), pytest.raises(CheckpointError, match=said):
        rig.restore()
    assert rig.names() == [] and rig.trainer.held == 0


def test_what_is_read_back_as_something_else_is_found(make_rig: MakeRig) -> None:
    rig = make_rig(trial=True)

    def spoil() -> None:
        for path in rig.folder.glob("*.tmp/trainer-*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    with calling("checkpoint.rename", spoil), pytest.raises(CheckpointError, match="read back as something else"):
        rig.restore()
    assert rig.names() == []


def test_each_rank_writes_its_own_file_and_one_that_cannot_is_named(make_rig: MakeRig, ranks: int) -> None:
    if not ranks:
        pytest.skip("it has none")
    rig, written = make_rig(trial=True), list[str]()
    for worker in rig.trainer.workers:
        worker.fault = lambda path, tell: written.append(path.name)
    rig.restore()
    assert sorted(written) == [f"trainer-0000{rank}-of-00003.safetensors" for rank in range(3)]

    def fails(path: Path, tell: Callable[[int], None]) -> None:
        raise WorkerError("trainer-1 on b: [Errno 30] Read-only file system")

    rig.trainer.workers[1].fault = fails
    with pytest.raises(CheckpointError, match=r"cannot save step 0 in .*trainer-1 on b: .*Read-only"):
        rig.restore()


def test_a_sample_is_the_first_tensors_some_of_every_rank_and_bounded(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    whole = stage(STATE, {"trainer": rig.trainer.snapshot(), "recorder": rig.notes.snapshot()})
    assert {name for file in trial.in_small(whole).files for name in file.specs} == {"model/w", "optimizer/exp_avg/w"}
    monkeypatch.setattr(trial, "_BYTES", 200)
    small = trial.in_small(whole)
    assert {name for file in small.files for name in file.specs} == {"optimizer/exp_avg/w"}
    assert [file.name for file in small.files] == [file.name for file in whole.files]
    assert small.step == 3 and small.state == whole.state
    monkeypatch.setattr(trial, "_BYTES", 0)
    assert all(not file.specs for file in trial.in_small(whole).files)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_export_is_made_when_its_save_is_durable_and_before_its_snapshot_is_let_go_of(
    make_rig: MakeRig, mode: str
) -> None:
    exports = FakeExports()
    rig = make_rig(exports=exports, mode=mode)
    seen: list[tuple[list[int], int]] = []

    def look(staged: Staged) -> None:
        seen.append((rig.statuses("durable"), rig.trainer.held))
        for snapshot in staged.snapshots.values():
            for tensor in snapshot.tensors.values():
                assert tensor.data.nbytes  # still there

    exports.look = look
    rig.run(8)
    assert exports.done == [4, 8]
    assert seen == [([2, 4], 1), ([2, 4, 6, 8], 1)] and rig.trainer.held == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_save_that_an_export_follows_lets_go_of_all_but_the_weights(tmp_path: Path, again: bool) -> None:
    told: list[str] = []
    data = TensorBytes(dtype="U8", shape=(8,), data=memoryview(bytes(8)))
    tensors = {"model/w": data, "optimizer/exp_avg/w": data}
    committer = Committer(
        folder=tmp_path, attempt=1, identity={}, settings={}, retention={}, read_again=lambda step: again
    )
    committer.commit(stage(STATE, {"trainer": Snapshot(tensors=tensors, written=told.append)}), lambda count: None)
    assert sorted(told) == (["optimizer/exp_avg/w"] if again else sorted(tensors))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failed_export_never_costs_the_checkpoint(make_rig: MakeRig, tmp_path: Path, mode: str) -> None:
    exports = FakeExports()
    exports.fails = "cannot export to x: the disk is full"
    rig = make_rig(exports=exports, mode=mode, on_failure="continue", last_step=8)
    rig.run(8)
    assert rig.statuses("durable") == [2, 4, 6, 8] and rig.statuses("failed") == [] and rig.trainer.held == 0
    assert [text for text in rig.warnings() if "is saved, but not exported: cannot export to x" in text]
    rig = make_rig(tmp_path / "stops", exports=exports, mode=mode)
    with pytest.raises(CheckpointError, match="step 4 is saved, but not exported: cannot export to x"):
        rig.run(6)
    assert 4 in rig.statuses("durable") and rig.trainer.held == 0
    assert "step-00000004" in rig.names()


def test_an_export_that_a_kill_cost_is_made_by_the_next_start(make_rig: MakeRig) -> None:
    exports = FakeExports()
    rig = make_rig(exports=exports)
    rig.run(4)
    exports.done.clear()
    again = make_rig(exports=exports, attempt=2)
    again.restore()
    assert exports.done == [4] and again.trainer.held == 0
    make_rig(exports=exports, attempt=3).restore()
    assert exports.done == [4]


def test_an_export_that_is_waited_for_too_long_is_left_and_its_checkpoint_stays(make_rig: MakeRig) -> None:
    exports, go = FakeExports(), threading.Event()
    exports.look = lambda staged: go.wait(5)
    rig = make_rig(exports=exports, mode="async", grace=0.1)
    for _ in range(4):
        rig.step()
    rig.manager.drain()
    go.set()
    assert 4 in rig.statuses("durable")
    ends = threading.Event()
    while not any("is saved, but not exported" in text for text in rig.warnings()) and not ends.wait(0.01):
        pass
    assert "is waited for no longer" in rig.warnings()[0] and exports.done == []


def test_a_read_only_folder_is_said_with_what_to_do(make_rig: MakeRig) -> None:
    rig = make_rig(trial=True)

    def read_only() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with calling("checkpoint.mkdir", read_only), pytest.raises(CheckpointError, match=r"cannot save .*Read-only file"):
        rig.restore()
    notices = [event for event in rig.events if isinstance(event, (Notice, CheckpointEvent))]
    assert notices
