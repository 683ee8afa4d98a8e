import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.checkpoint.retention import Retention, RetentionRule, folder_bytes
from tidemill.contracts.events import CheckpointEvent, Event, Notice, ignore
from tidemill.faults import armed


class Numbers:
    """What a test says was recorded."""

    def __init__(self, values: dict[int, float], names: Sequence[str] = ("reward/mean",)) -> None:
        self.found, self.known = values, names

    def values(self) -> dict[int, float]:
        """Given."""
        return self.found

    def names(self) -> Sequence[str]:
        """Given."""
        return self.known


class Unreadable(Numbers):
    """A file that cannot be read."""

    def values(self) -> dict[int, float]:
        """Fails."""
        raise OSError("no such disk")


def make(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"step-{step:08d}").mkdir(parents=True)
        (folder / f"step-{step:08d}" / "manifest.json").write_text("{}")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_left(folder: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in left(folder)]


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice) and event.level == "warning"]


def last(count: int) -> RetentionRule:
    return RetentionRule(keep_last=count)


def test_the_last_ones_and_the_round_ones_stay() -> None:
    reasons = RetentionRule(keep_last=2, keep_every=3).reasons([1, 2, 3, 4, 5, 6, 7], {})
    assert reasons == {3: "a multiple of 3", 6: "one of the last 2, a multiple of 3", 7: "the newest"}


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 50), min_size=1),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["", "x", "-x"]),
    st.dictionaries(st.integers(0, 50), st.floats(-9, 9)),
)
def test_the_newest_always_stays_and_the_rest_by_the_rule(
    steps: set[int], last: int, every: int, best: str, values: dict[int, float]
) -> None:
    kept = RetentionRule(keep_last=last, keep_every=every, keep_best=best).reasons(steps, values)
    ordered = sorted(steps)
    champion = -1
    for step in ordered if best else ():
        if step in values and (
            champion < 0 or (values[step] <= values[champion] if best == "-x" else values[step] >= values[champion])
        ):
            champion = step
    slow = [
        step
        for index, step in enumerate(ordered)
        if last == 0 or len(ordered) - index <= last or (every and step % every == 0) or step == champion
    ]
    assert sorted(kept) == slow and ordered[-1] in kept


def test_a_rule_is_what_its_manifest_says() -> None:
    rule = RetentionRule(keep_last=3, keep_every=10, keep_best="-policy/loss")
    assert RetentionRule.from_json(rule.to_json()) == rule
    assert RetentionRule.from_json({"keep_last": 1, "keep_every": 4}) == RetentionRule(keep_last=1, keep_every=4)
    assert RetentionRule.from_json({}).keep_last == 0


@pytest.mark.parametrize(("best", "stays"), [("reward/mean", [2, 5]), ("-reward/mean", [1, 5]), ("", [5])])
def test_the_best_so_far_stays_beside_the_newest_and_of_equals_the_newer(
    tmp_path: Path, best: str, stays: list[int]
) -> None:
    values = {0: 9.0, 1: 0.1, 2: 0.9, 3: 0.5}  # step 0 was never saved, 4 and 5 not measured so far
    rule = RetentionRule(keep_last=1, keep_best=best)
    gone = []
    retention = Retention(tmp_path, rule=rule, attempt=1, emit=ignore, measured=Numbers(values))
    for step in range(1, 6):
        make(tmp_path, step)
        gone += retention(step)
    assert steps_left(tmp_path) == stays
    assert sorted([*gone, *stays]) == [1, 2, 3, 4, 5]
    values[4] = values[5] = 0.9
    make(tmp_path, 6)
    retention(6)
    assert steps_left(tmp_path) == ([5, 6] if best == "reward/mean" else [1, 6] if best else [6])


def test_a_name_that_nothing_has_is_told_once_with_the_names_there_are(tmp_path: Path) -> None:
    events: list[Event] = []
    numbers = Numbers({}, ["policy/loss", "reward/mean"])
    rule = RetentionRule(keep_last=1, keep_best="-rewards")
    retention = Retention(tmp_path, rule=rule, attempt=1, emit=events.append, measured=numbers)
    for step in (1, 2):
        make(tmp_path, step)
        retention(step)
    (text,) = texts(events)
    assert text.startswith('checkpoint.keep_best = "-rewards": nothing of that name was recorded up to step 1')
    assert text.endswith("recorded are: policy/loss, reward/mean")
    assert steps_left(tmp_path) == [2]


def test_numbers_that_cannot_be_read_delete_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    make(tmp_path, 1, 2)
    rule = RetentionRule(keep_last=1, keep_best="reward/mean")
    retention = Retention(tmp_path, rule=rule, attempt=1, emit=events.append, measured=Unreadable({}))
    assert retention(2) == [] and steps_left(tmp_path) == [1, 2]
    assert "cannot tell which checkpoint is the best by reward/mean: no such disk" in texts(events)[0]


def test_what_is_broken_later_or_foreign_is_not_touched(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 9)
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    make(tmp_path / "elsewhere", 1)
    (tmp_path / "step-2").symlink_to(tmp_path / "elsewhere" / "step-00000001", target_is_directory=True)
    events: list[Event] = []
    assert Retention(tmp_path, rule=last(1), attempt=1, emit=events.append)(3) == [1, 2]
    assert left(tmp_path) == [
        "elsewhere", "notes.txt", "step-00000000", "step-00000003", "step-00000009", "step-2",
    ]  # fmt: skip
    told = [event for event in events if isinstance(event, CheckpointEvent)]
    assert [(event.step, event.bytes) for event in told] == [(1, 2), (2, 2)] and texts(events) == []


@pytest.mark.parametrize("stage", ["rename", "fsync", "unlink"])
def test_what_cannot_be_deleted_is_a_warning_and_is_tried_again(tmp_path: Path, stage: str) -> None:
    make(tmp_path, 1, 2)
    events: list[Event] = []
    retention = Retention(tmp_path, rule=last(1), attempt=1, emit=events.append)
    with armed(f"checkpoint.retention.{stage}=disk-full"):
        assert retention(2) == []
    assert len(texts(events)) == 1
    assert len(left(tmp_path)) == 2
    make(tmp_path, 3)
    retention(3)
    assert left(tmp_path) == ["step-00000003"]


def test_trash_that_was_left_does_not_stand_in_the_way_of_more(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.1.trash")
    Retention(tmp_path, rule=last(1), attempt=1, emit=ignore)(2)
    assert left(tmp_path) == ["step-00000002"]


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"45")
    assert folder_bytes(tmp_path) == 5 and folder_bytes(tmp_path / "none") == 0
