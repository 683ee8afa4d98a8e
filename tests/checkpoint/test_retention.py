import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.checkpoint.retention import prune, reasons_to_keep
from tidemill.contracts.events import CheckpointEvent, Event, Notice


def make(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"step-{step:08d}").mkdir(parents=True)
        (folder / f"step-{step:08d}" / "manifest.json").write_text("{}")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_ones_and_the_round_ones_stay() -> None:
    reasons = reasons_to_keep([1, 2, 3, 4, 5, 6, 7], keep_last=2, keep_every=3)
    assert reasons == {3: "a multiple of 3", 6: "one of the last 2", 7: "the newest"}


@settings(deadline=None)
@given(st.sets(st.integers(0, 50), min_size=1), st.integers(0, 5), st.integers(0, 5))
def test_the_newest_always_stays_and_the_rest_by_the_rule(steps: set[int], last: int, every: int) -> None:
    kept = reasons_to_keep(steps, keep_last=last, keep_every=every)
    ordered = sorted(steps)
    slow = [
        step
        for index, step in enumerate(ordered)
        if last == 0 or len(ordered) - index <= last or (every and step % every == 0)
    ]
    assert sorted(kept) == slow and ordered[-1] in kept


def test_what_is_broken_later_or_foreign_is_not_touched(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 9)
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    events: list[Event] = []
    prune(tmp_path, newest=3, keep_last=1, keep_every=0, attempt=1, emit=events.append)
    assert left(tmp_path) == ["notes.txt", "step-00000000", "step-00000003", "step-00000009"]
    assert [event.step for event in events if isinstance(event, CheckpointEvent)] == [1, 2]


@pytest.mark.parametrize("stage", ["rename", "fsync", "unlink"])
def test_what_cannot_be_deleted_is_a_warning_and_is_tried_again(tmp_path: Path, stage: str) -> None:
    from tidemill.faults import armed

    make(tmp_path, 1, 2)
    events: list[Event] = []
    with armed(f"checkpoint.retention.{stage}=disk-full"):
        prune(tmp_path, newest=2, keep_last=1, keep_every=0, attempt=1, emit=events.append)
    assert [event.level for event in events if isinstance(event, Notice)] == ["warning"]
    assert len(left(tmp_path)) == 2
    make(tmp_path, 3)
    prune(tmp_path, newest=3, keep_last=1, keep_every=0, attempt=1, emit=events.append)
    assert left(tmp_path) == ["step-00000003"]


def test_trash_that_was_left_does_not_stand_in_the_way_of_more(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.1.trash")
    prune(tmp_path, newest=2, keep_last=1, keep_every=0, attempt=1, emit=lambda event: None)
    assert left(tmp_path) == ["step-00000002"]
