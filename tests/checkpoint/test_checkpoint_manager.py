"""The manager as a run meets it: saves, stops, resumes, refusals."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.manager import CheckpointManager
from tidemill.contracts.checkpoint import Checkpointer, Snapshot
from tidemill.contracts.events import CheckpointEvent, Notice, PhaseDone
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Tenant
from tidemill.contracts.state import Cursor
from tidemill.errors import CheckpointError
from tidemill.faults import armed
from tidemill.testing.suites.checkpointer import CheckpointerSuite, Start

MakeRig = Callable[..., Any]


@pytest.fixture(params=[0, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    """All of it in one process, and with a trainer whose ranks write for themselves."""
    count: int = request.param
    return count


def test_it_is_a_checkpointer_and_the_fake_a_tenant(make_rig: MakeRig) -> None:
    manager: Checkpointer = make_rig().manager
    trainer: Tenant = make_rig().trainer
    assert isinstance(manager, CheckpointManager) and trainer.name == "trainer"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_stopped_anywhere_and_resumed_is_the_uninterrupted_one(
    make_rig: MakeRig, tmp_path: Path, mode: str
) -> None:
    for stop in range(1, 10):
        folder = tmp_path / f"{stop}"
        make_rig(folder, mode=mode).run(stop)
        second = make_rig(folder, mode=mode, attempt=2, last_step=10)
        state = second.restore()
        assert (state is None) == (stop < 2)
        assert second.is_at(stop // 2 * 2) and second.state.attempt == 2
        second.run(10)
        assert second.is_at(10)
        assert second.names() == ["step-00000008", "step-00000010"]


def test_three_generations_save_and_resume(make_rig: MakeRig) -> None:
    for attempt in (1, 2, 3):
        rig = make_rig(attempt=attempt, keep_last=1)
        rig.restore()
        assert rig.is_at(4 * (attempt - 1))
        rig.run(4 * attempt)
        assert rig.is_at(4 * attempt)


def test_the_schedule_is_every_so_many_steps_and_the_last(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(every=3, last_step=7, keep_last=9)
    rig.run(7)
    assert rig.statuses("durable") == [3, 6, 7]
    only_last = make_rig(tmp_path / "b", every=0, last_step=4)
    only_last.run(4)
    assert only_last.statuses("durable") == [4]


def test_retention_follows_each_save_and_the_newest_stays(make_rig: MakeRig) -> None:
    rig = make_rig(every=1, keep_last=1, keep_every=4)
    for step in range(1, 7):
        rig.step()
        assert f"step-{step:08d}" in rig.names()
    assert rig.names() == ["step-00000004", "step-00000006"]
    assert rig.statuses("pruned") == [1, 2, 3, 5]


def test_a_writer_slower_than_the_steps_makes_them_wait_and_nothing_is_lost(make_rig: MakeRig) -> None:
    rig = make_rig(mode="async", every=1, keep_last=1)
    with armed(",".join(["checkpoint.rename=delay:0.2"])):
        rig.run(4)
    assert rig.statuses("durable") == [1, 2, 3, 4] and rig.names() == ["step-00000004"]
    stalls = [event.seconds for event in rig.events if isinstance(event, PhaseDone) and event.name == "save_stall"]
    assert len(stalls) == 4 and max(stalls) > 0.1
    assert rig.trainer.held == 0


def test_what_is_trained_after_a_save_does_not_leak_into_it(make_rig: MakeRig) -> None:
    rig = make_rig(mode="async")
    with armed("checkpoint.open=delay:0.3"):
        rig.run(3)
    second = make_rig(attempt=2)
    second.restore()
    assert second.is_at(2)


def test_a_sleeping_trainer_is_saved_without_a_lease_and_an_awake_one_with(make_rig: MakeRig) -> None:
    rig = make_rig(every=0)
    rig.step()
    rig.trainer.sleep()
    rig.manager.save(rig.state)
    assert rig.residency.leases == [] and rig.trainer.resident() == Part.NONE
    rig.step()
    rig.trainer.wake_up(Part.WEIGHTS)
    rig.manager.save(rig.state)
    assert rig.residency.leases == ["trainer"] and rig.statuses("durable") == [1, 2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_state_is_saved_once(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(mode=mode, last_step=2)
    rig.step()
    rig.step()
    rig.manager.save(rig.state)
    rig.manager.drain()
    rig.manager.save(rig.state)
    assert rig.statuses("durable") == [2]
    second = make_rig(attempt=2, mode=mode)
    second.restore()
    second.manager.save(second.state)
    second.manager.drain()
    assert second.statuses("durable") == []


def test_a_stop_saves_again_what_a_save_in_flight_was_allowed_to_lose(make_rig: MakeRig) -> None:
    rig = make_rig(mode="async", on_failure="continue")
    with armed("checkpoint.open=delay:0.3,checkpoint.manifest=disk-full"):
        rig.step()
        rig.step()  # step 2 is scheduled: its save is in flight
        rig.manager.save(rig.state)
        rig.manager.drain()
    assert rig.statuses("failed") == [2]
    assert rig.statuses("durable") == [2]
    assert rig.trainer.held == 0


def test_a_stop_whose_save_fails_twice_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(mode="async", on_failure="continue")
    with (
        armed("checkpoint.open=delay:0.3,checkpoint.manifest=disk-full,checkpoint.state=disk-full@2"),
        pytest.raises(CheckpointError, match="step 2.*the disk is full"),
    ):
        rig.step()
        rig.step()
        rig.manager.save(rig.state)
        rig.manager.drain()
    assert rig.names() == []


def test_a_folder_that_takes_no_direct_writes_is_told_of_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def buffered_only(descriptor: int, data: memoryview, start: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", buffered_only)
    rig = make_rig()
    rig.run(6)
    told = [event.text for event in rig.events if isinstance(event, Notice) and "O_DIRECT" in event.text]
    assert len(told) == 1 and str(rig.folder) in told[0]
    again = make_rig(attempt=2)
    again.restore()
    assert again.is_at(6)


def test_a_restored_checkpoint_is_told_of_for_its_writer_may_have_died_before(make_rig: MakeRig) -> None:
    make_rig().run(2)
    second = make_rig(attempt=2)
    second.restore()
    assert second.statuses("restored") == [2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failed_save_stops_the_run_at_the_next_call(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(mode=mode)
    with armed("checkpoint.write=disk-full"), pytest.raises(CheckpointError, match="the disk is full"):
        rig.run(4)
    assert rig.names() == [] and rig.trainer.held == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failed_save_is_tried_again_at_the_next_when_the_settings_say_so(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(mode=mode, on_failure="continue")
    with armed("checkpoint.manifest=disk-full"):
        rig.run(4)
    assert rig.statuses("failed") == [2] and rig.names() == ["step-00000004"] and len(rig.warnings()) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_last_save_may_not_fail_whatever_the_settings_say(make_rig: MakeRig, mode: str) -> None:
    rig = make_rig(mode=mode, on_failure="continue", last_step=3)
    with armed("checkpoint.rename=disk-full@2"), pytest.raises(CheckpointError, match="step 3"):
        rig.run(3)
    assert rig.names() == ["step-00000002"]


def test_drain_gives_a_save_its_grace_and_the_last_step_all_the_time(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(mode="async", grace=0.1)
    with armed("checkpoint.manifest=delay:0.6"), pytest.raises(CheckpointError, match="left uncommitted"):
        rig.run(2)
    assert rig.names() == [] and rig.trainer.held == 0
    last = make_rig(tmp_path / "last", mode="async", grace=0.1, last_step=2)
    with armed("checkpoint.manifest=delay:0.6"):
        last.run(2)
    assert last.names() == ["step-00000002"]


def test_a_damaged_newest_one_is_named_set_aside_and_its_number_used_again(make_rig: MakeRig) -> None:
    make_rig().run(4)
    weights = sorted((make_rig().folder / "step-00000004").glob("trainer-*"))[-1]
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    rig = make_rig(attempt=2)
    rig.restore()
    assert rig.is_at(2) and rig.names() == ["step-00000002", "step-00000004.aside-2"]
    assert "step-00000004" in rig.warnings()[0] and "the checksum of" in rig.warnings()[0]
    rig.run(4)
    assert "step-00000004" in rig.names()


def test_nothing_is_renamed_when_every_checkpoint_is_damaged(make_rig: MakeRig) -> None:
    make_rig().run(4)
    rig = make_rig(attempt=2)
    for path in rig.folder.iterdir():
        (path / "state.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole"):
        rig.restore()
    assert rig.names() == ["step-00000002", "step-00000004"]


def test_another_model_is_refused_with_both_values_and_can_be_accepted_by_name(make_rig: MakeRig) -> None:
    make_rig().run(2)
    other = {"model": "a", "data": "c"}
    with pytest.raises(CheckpointError, match=r'its data is b, this run\'s is c;.*checkpoint\.accept = \["data"\]'):
        make_rig(attempt=2, identity=other).restore()
    with pytest.raises(CheckpointError, match="its data is b"):
        make_rig(attempt=2, identity=other, accept=("model",)).restore()
    rig = make_rig(attempt=2, identity=other, accept=("data",))
    rig.restore()
    assert rig.is_at(2)


def test_another_seed_is_another_run_unless_accepted(make_rig: MakeRig) -> None:
    make_rig().run(2)
    with pytest.raises(CheckpointError, match="its seed is 7, this run's is 8"):
        make_rig(attempt=2, seed=8).restore()
    assert make_rig(attempt=2, seed=8, accept=("seed",)).restore().seed == 8


def test_a_state_is_restored_as_the_changed_run_can_go_on_from_it(make_rig: MakeRig) -> None:
    make_rig().run(2)
    fitted = make_rig(attempt=2, fit=lambda state: replace(state, cursor=Cursor(epoch=state.cursor.epoch + 1)))
    state = fitted.restore()
    assert state is not None
    assert (state.step, state.attempt, state.cursor) == (2, 2, Cursor(epoch=1))


def test_a_part_that_is_gone_is_refused_and_one_that_is_new_walks_back(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.run(2)
    rig.manager._parts["critic"] = rig.notes
    rig.run(4)
    with pytest.raises(CheckpointError, match="state of critic"):
        make_rig(attempt=2).restore()
    more = make_rig(attempt=2)
    more.manager._parts["critic"] = more.notes
    more.restore()
    assert more.state.step == 4
    shutil.rmtree(more.folder / "step-00000004")
    with pytest.raises(CheckpointError, match="the part critic is missing"):
        more.restore()


def test_an_empty_folder_is_a_fresh_start_and_said(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.restore() is None
    assert any("starting at step 0" in getattr(event, "text", "") for event in rig.events)


def test_what_cannot_be_saved_is_found_before_the_first_step(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    monkeypatch.setattr(rig.notes, "snapshot", lambda: Snapshot(extra={"bad": object()}))
    with pytest.raises(CheckpointError, match="the part recorder"):
        rig.restore()
    assert rig.trainer.held == 0
    assert make_rig(settings={"x": 1}).restore() is None
    with pytest.raises(CheckpointError, match="settings"):
        make_rig(settings={"x": object()}).restore()


def test_a_folder_that_cannot_be_written_is_refused_at_once(make_rig: MakeRig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot keep checkpoints in .*; make the folder writable"):
        make_rig(tmp_path / "file" / "checkpoints")
    for fault in ("checkpoint.probe", "checkpoint.fsync-probe"):
        with armed(f"{fault}=disk-full"), pytest.raises(CheckpointError, match="cannot keep checkpoints"):
            make_rig()


def test_paths_may_have_spaces_letters_of_all_scripts_and_links(make_rig: MakeRig, tmp_path: Path) -> None:
    real = tmp_path / "ein Läuf ☃" / "检查点"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    make_rig(tmp_path / "link").run(2)
    rig = make_rig(real, attempt=2)
    rig.restore()
    assert rig.is_at(2)


def test_a_clock_that_goes_backwards_changes_nothing(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    make_rig(keep_last=1).run(6)
    rig = make_rig(attempt=2)
    rig.restore()
    assert rig.is_at(6) and rig.names() == ["step-00000006"]


def test_old_checkpoints_that_cannot_be_deleted_do_not_stop_a_run(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, blocked = Path.rename, [True]

    def rename(path: Path, target: Path) -> Path:
        if blocked[0] and str(target).endswith(".trash"):
            raise OSError(errno.EBUSY, "held open elsewhere")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    rig = make_rig(keep_last=1)
    rig.run(4)
    assert rig.names() == ["step-00000002", "step-00000004"] and "held open elsewhere" in rig.warnings()[0]
    blocked[0] = False
    rig.run(6)
    assert rig.names() == ["step-00000006"]


def test_a_snapshot_that_fails_lets_go_of_the_others(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()

    def fail() -> Snapshot:
        raise CheckpointError("no host memory")

    monkeypatch.setattr(rig.notes, "snapshot", fail)
    with pytest.raises(CheckpointError, match="no host memory"):
        rig.run(2)
    assert rig.trainer.held == 0


def test_names_of_parts_are_checked(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    for name, said in (("../x", "letters, digits"), ("trainer", "two parts"), ("random", "two parts")):
        monkeypatch.setattr(type(rig.notes), "name", name)
        with pytest.raises(CheckpointError, match=said):
            make_rig()


def test_events_say_bytes_path_and_seconds(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.run(2)
    staged, durable = (event for event in rig.events if isinstance(event, CheckpointEvent))
    assert (staged.status, durable.status) == ("staged", "durable")
    assert durable.path.endswith("step-00000002") and durable.bytes == staged.bytes > 8000 and durable.seconds > 0


class TestCheckpointer(CheckpointerSuite):
    """The suite that every checkpointer passes."""

    @pytest.fixture(params=["sync", "async"])
    def start(self, make_rig: MakeRig, request: pytest.FixtureRequest) -> Callable[[], Start]:
        """Rigs with rising attempts over one folder."""
        attempts = count(1)

        def begin() -> Start:
            attempt = next(attempts)
            rig = make_rig(mode=request.param, last_step=5, attempt=attempt)
            return Start(rig.manager, attempt, rig.trainer.step, lambda: str(rig.trainer.data))

        return begin
