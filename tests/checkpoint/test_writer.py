import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.staged import Staged, stage
from tidemill.checkpoint.writer import Writer
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.events import CheckpointEvent, Event, Notice, PhaseDone
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError

Commit = Callable[[Staged, Callable[[int], None]], Path]


class Desk:
    """Builds staged states and writers, and keeps what they say."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.released: list[int] = []
        self.after: list[int] = []

    def staged(self, step: int) -> Staged:
        state = RunState(step=step, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
        return stage(state, {"trainer": Snapshot(release=lambda: self.released.append(step))})

    def writer(self, commit: Commit, **options: Any) -> Writer:
        defaults: dict[str, Any] = {
            "after": self.after.append,
            "background": True,
            "stop_on_failure": True,
            "patience": 5.0,
            "emit": self.events.append,
        }
        return Writer(commit=commit, **defaults | options)

    def statuses(self) -> list[str]:
        return [event.status for event in self.events if isinstance(event, CheckpointEvent)]


@pytest.fixture
def desk() -> Desk:
    """A fresh one."""
    return Desk()


def quick(staged: Staged, advance: Callable[[int], None]) -> Path:
    advance(1)
    return Path(f"step-{staged.step}")


def failing(staged: Staged, advance: Callable[[int], None]) -> Path:
    raise CheckpointError(f"cannot save step {staged.step}")


@pytest.mark.parametrize("background", [True, False])
def test_a_save_is_written_announced_released_and_followed_by_retention(desk: Desk, background: bool) -> None:
    writer = desk.writer(quick, background=background)
    writer.submit(desk.staged(3), must=False)
    writer.wait()
    assert writer.durable_step == 3 and writer.in_flight == -1
    assert desk.statuses() == ["durable"] and desk.after == [3] and 3 in desk.released
    assert [event.name for event in desk.events if isinstance(event, PhaseDone)] == ["save_durable"]


def test_submit_returns_while_the_disk_is_slow_and_a_second_save_waits_for_the_first(desk: Desk) -> None:
    go, order = threading.Event(), []

    def slow(staged: Staged, advance: Callable[[int], None]) -> Path:
        assert go.wait(5)
        order.append(staged.step)
        return Path("x")

    writer = desk.writer(slow)
    writer.submit(desk.staged(1), must=False)
    assert writer.in_flight == 1 and order == []
    threading.Timer(0.1, go.set).start()
    writer.submit(desk.staged(2), must=False)
    assert order[0] == 1
    writer.wait()
    assert order == [1, 2] and desk.after == [1, 2]


@pytest.mark.parametrize("background", [True, False])
def test_a_failure_surfaces_once_and_the_snapshot_is_released(desk: Desk, background: bool) -> None:
    writer = desk.writer(failing, background=background)
    writer.submit(desk.staged(1), must=False)
    writer.wait()
    with pytest.raises(CheckpointError, match="cannot save step 1"):
        writer.surface()
    writer.surface()
    assert desk.statuses() == ["failed"] and desk.released and desk.after == []


def test_an_unforeseen_exception_surfaces_too(desk: Desk) -> None:
    def broken(staged: Staged, advance: Callable[[int], None]) -> Path:
        raise ZeroDivisionError("why")

    writer = desk.writer(broken)
    writer.submit(desk.staged(1), must=False)
    writer.wait()
    with pytest.raises(CheckpointError, match="cannot save step 1: ZeroDivisionError: why"):
        writer.surface()


def test_a_failure_is_only_a_warning_when_the_run_goes_on_unless_it_must_not(desk: Desk) -> None:
    writer = desk.writer(failing, stop_on_failure=False)
    writer.submit(desk.staged(1), must=False)
    writer.wait()
    writer.surface()
    assert any("the run goes on" in event.text for event in desk.events if isinstance(event, Notice))
    writer.submit(desk.staged(2), must=True)
    writer.wait()
    with pytest.raises(CheckpointError, match="cannot save step 2"):
        writer.surface()


def test_a_wait_ends_at_its_limit_and_the_save_is_never_committed(desk: Desk) -> None:
    committed: list[int] = []

    def slow(staged: Staged, advance: Callable[[int], None]) -> Path:
        for _ in range(500):
            threading.Event().wait(0.01)
            advance(1)
        committed.append(staged.step)
        return Path("x")

    writer = desk.writer(slow)
    writer.submit(desk.staged(1), must=True)
    with pytest.raises(CheckpointError, match=r"step 1: it is not durable after .* is left uncommitted"):
        writer.wait(0.2)
    assert committed == [] and desk.released and desk.statuses() == ["failed"]
    writer.surface()


def test_a_disk_that_hangs_is_given_up(desk: Desk) -> None:
    go = threading.Event()

    def hung(staged: Staged, advance: Callable[[int], None]) -> Path:
        go.wait(20)
        advance(0)
        return Path("x")

    writer = desk.writer(hung, patience=0.2)
    writer.submit(desk.staged(1), must=True)
    with pytest.raises(CheckpointError, match="not durable"):
        writer.wait()
    go.set()


def test_what_fails_after_the_save_is_durable_is_a_warning(desk: Desk) -> None:
    def after(step: int) -> None:
        raise OSError("cannot list")

    writer = desk.writer(quick, after=after)
    writer.submit(desk.staged(1), must=True)
    writer.wait()
    writer.surface()
    assert writer.durable_step == 1 and desk.statuses() == ["durable"]
    assert any("clearing of older checkpoints failed" in e.text for e in desk.events if isinstance(e, Notice))


def test_an_abandoned_save_that_lives_on_is_never_written_beside(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.checkpoint.writer._NOTICE_ABANDON", 0.05)
    go, writing, most = threading.Event(), [0], [0]

    def hung(staged: Staged, advance: Callable[[int], None]) -> Path:
        writing[0] += 1
        most[0] = max(most[0], writing[0])
        try:
            assert go.wait(20)
            advance(0)
        finally:
            writing[0] -= 1
        return Path("x")

    writer = desk.writer(hung)
    writer.submit(desk.staged(1), must=True)
    with pytest.raises(CheckpointError, match="step 1: it is not durable"):
        writer.wait(0.1)
    assert writer.in_flight == -1, "nobody may take it for saved"
    for _ in range(2):
        with pytest.raises(CheckpointError, match="step 1: it is not durable"):
            writer.submit(desk.staged(2), must=True)
    assert desk.released == [2, 2]
    go.set()
    writer._thread.join(5)
    writer.submit(desk.staged(2), must=True)
    writer.wait()
    assert (writer.durable_step, most[0]) == (2, 1)


def unreleasable(step: int, released: list[str]) -> Staged:
    """Two snapshots, of which the later one does not let go."""

    def release() -> None:
        raise ZeroDivisionError("held")

    state = RunState(step=step, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    parts = {"trainer": Snapshot(release=lambda: released.append("trainer")), "critic": Snapshot(release=release)}
    return stage(state, parts)


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_whose_snapshot_cannot_be_released_surfaces_with_a_note_and_is_over(
    desk: Desk, background: bool
) -> None:
    writer, released = desk.writer(failing, background=background), list[str]()
    writer.submit(unreleasable(1, released), must=False)
    writer.wait()
    assert writer.in_flight == -1 and released == ["trainer"]
    with pytest.raises(CheckpointError, match="cannot save step 1") as caught:
        writer.surface()
    assert "ZeroDivisionError('held')" in caught.value.__notes__[0]


@pytest.mark.parametrize("background", [True, False])
def test_a_durable_save_whose_snapshot_cannot_be_released_is_durable_and_over(desk: Desk, background: bool) -> None:
    writer, released = desk.writer(quick, background=background), list[str]()
    writer.submit(unreleasable(1, released), must=True)
    writer.wait()
    writer.surface()
    assert (writer.durable_step, writer.in_flight, desk.after) == (1, -1, [1])
    assert "trainer" in released and desk.statuses() == ["durable"]
    assert any("could not all be released" in e.text for e in desk.events if isinstance(e, Notice))
    writer.submit(desk.staged(2), must=True)
    writer.wait()
    assert writer.durable_step == 2


def test_a_save_that_is_refused_says_so_whatever_its_release_says(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.checkpoint.writer._NOTICE_ABANDON", 0.05)
    go = threading.Event()

    def hung(staged: Staged, advance: Callable[[int], None]) -> Path:
        go.wait(20)
        return Path("x")

    writer = desk.writer(hung, patience=0.1)
    writer.submit(desk.staged(1), must=True)
    with pytest.raises(CheckpointError, match="step 1: it is not durable") as caught:
        writer.submit(unreleasable(2, []), must=True)
    assert caught.value.__notes__ == ["and a snapshot could not be released: ZeroDivisionError('held')"]
    go.set()


@pytest.mark.parametrize("behind", ["export", "after"])
def test_what_hangs_behind_a_durable_save_is_given_up_and_nothing_is_written_beside_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    monkeypatch.setattr("tidemill.checkpoint.writer._NOTICE_ABANDON", 0.05)
    monkeypatch.setattr("tidemill.checkpoint.writer._LET_GO", 0.05)
    go = threading.Event()

    def hung(*given: object) -> None:
        go.wait(20)

    writer = desk.writer(quick, patience=0.1, **{behind: hung})
    writer.submit(desk.staged(1), must=True)
    writer.wait()
    assert writer.durable_step == 1 and desk.statuses() == ["durable"]
    assert any("is waited for no longer" in event.text for event in desk.events if isinstance(event, Notice))
    with pytest.raises(CheckpointError, match="cannot save step 2: step 1 is saved, but its export or the clearing"):
        writer.submit(desk.staged(2), must=True)
    assert 2 in desk.released
    go.set()
    writer._thread.join(5)
    writer.submit(desk.staged(2), must=True)
    writer.wait()
    assert writer.durable_step == 2


def test_a_run_that_goes_on_leaves_saves_out_while_a_hung_one_lives_unless_one_must_be(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.checkpoint.writer._NOTICE_ABANDON", 0.05)
    go, endless = threading.Event(), float("inf")

    def hung(staged: Staged, advance: Callable[[int], None]) -> Path:
        go.wait(20)
        return quick(staged, advance)

    writer = desk.writer(hung, patience=0.1, stop_on_failure=False)
    writer.submit(desk.staged(1), must=False)
    threads = threading.active_count()
    for step in range(2, 5):
        assert not writer.make_way(step, endless, must=False)
    assert threading.active_count() == threads and desk.statuses() == ["failed"] * 3
    with pytest.raises(CheckpointError, match="step 1: it is not durable"):
        writer.make_way(5, endless, must=True)
    go.set()
    writer._thread.join(5)
    assert writer.make_way(6, endless, must=False)
    writer.submit(desk.staged(6), must=False)
    writer.wait()
    assert writer.durable_step == 6


def test_an_export_that_is_slow_to_notice_costs_the_next_save_its_time_and_not_its_place(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.checkpoint.writer._NOTICE_ABANDON", 0.05)
    ended = threading.Event()

    def slow(staged: Staged, advance: Callable[[int], None]) -> None:
        if staged.step == 1:
            threading.Event().wait(0.6)
            ended.set()

    writer = desk.writer(quick, export=slow)
    writer.submit(desk.staged(1), must=False)
    while writer.durable_step != 1:
        pass
    assert writer.make_way(2, 0.05, must=True) and ended.is_set()
    writer.submit(desk.staged(2), must=True)
    writer.wait()
    assert writer.durable_step == 2
