"""A trainer of several ranks: what can go wrong in one of them.

Modules: tidemill.checkpoint.manager, tidemill.checkpoint.staged, tidemill.checkpoint.ranks.
"""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.checkpoint.manifest import MANIFEST, Manifest
from tidemill.checkpoint.ranks import ranks_in_words
from tidemill.contracts.events import Notice
from tidemill.errors import CheckpointError, WorkerError
from tidemill.faults import armed

MakeRig = Callable[..., Any]
Tell = Callable[[int], None]


@pytest.fixture
def ranks() -> int:
    return 3


def dies(path: Path, tell: Tell) -> None:
    path.write_bytes(b"half of it")
    tell(10)
    raise WorkerError("trainer-1 died (exit code -9); the run cannot go on without it")


def disk_full(path: Path, tell: Tell) -> None:
    path.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def goes_on_for_ever(path: Path, tell: Tell) -> None:
    path.write_bytes(b"half of it")
    while True:
        tell(1)
        time.sleep(0.01)


def writes_elsewhere(path: Path, tell: Tell) -> None:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))


def waited(result: object) -> None:
    """What was waited for does not matter."""


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (dies, r"cannot save step 4 in .*checkpoints: trainer-1 died \(exit code -9\)"),
        (disk_full, r"cannot save step 4 in .* the disk is full \(.*trainer-00001-of-00003.safetensors"),
        (writes_elsewhere, r"whoever writes trainer-00001-of-00003.safetensors does not see .*every host of the run"),
    ],
)
def test_a_rank_that_fails_ends_the_save_of_all_and_older_ones_stay(
    make_rig: MakeRig, mode: str, fault: Callable[[Path, Tell], None], said: str
) -> None:
    rig = make_rig(mode=mode)
    rig.run(2)
    rig.trainer.workers[1].fault = fault
    rig.trainer.workers[0].fault = rig.trainer.workers[2].fault = goes_on_for_ever
    with pytest.raises(CheckpointError, match=said):
        rig.run(4)
    assert rig.names() == ["step-00000002"] and rig.trainer.held == 0
    assert rig.statuses("failed") == [4]
    assert not [thread for thread in threading.enumerate() if "together" in thread.name]
    again = make_rig(attempt=2)
    again.restore()
    assert again.is_at(2)
    again.run(4)
    assert again.is_at(4) and again.names() == ["step-00000002", "step-00000004"]


def test_a_run_that_goes_on_after_a_failed_save_makes_the_next_one(make_rig: MakeRig) -> None:
    rig = make_rig(mode="async", on_failure="continue")
    with armed("checkpoint.fsync-file=disk-full@2"):
        rig.run(4)
    assert rig.statuses("failed") == [2] and rig.names() == ["step-00000004"]
    assert "the disk is full" in rig.warnings()[0] and "of-00003.safetensors" in rig.warnings()[0]


def test_a_rank_that_never_ends_is_given_up_after_the_grace_and_let_go_of(make_rig: MakeRig) -> None:
    rig = make_rig(mode="async", grace=0.2)
    rig.trainer.workers[2].fault = goes_on_for_ever
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="left uncommitted"):
        rig.run(2)
    assert rig.names() == [] and rig.trainer.held == 0 and threading.active_count() == before


def test_a_rank_that_is_silent_is_given_up_when_patience_ends(make_rig: MakeRig) -> None:
    go = threading.Event()
    rig = make_rig(mode="async", patience=0.3, last_step=2)
    rig.trainer.workers[2].fault = lambda path, tell: waited(go.wait(20))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot wait longer for the save of step 2"):
        rig.run(2)
    assert time.monotonic() - began < 10
    go.set()
    deadline = time.monotonic() + 15
    while rig.trainer.held and time.monotonic() < deadline:
        time.sleep(0.02)
    assert rig.names() == [] and rig.trainer.held == 0


def test_ranks_write_at_the_same_time(make_rig: MakeRig) -> None:
    meeting = threading.Barrier(3, timeout=10)
    rig = make_rig()
    for worker in rig.trainer.workers:
        worker.fault = lambda path, tell: waited(meeting.wait())
    rig.run(2)
    assert rig.names() == ["step-00000002"]


def test_the_manifest_says_which_piece_lies_where(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.run(2)
    manifest = Manifest.read(rig.folder / "step-00000002" / MANIFEST)
    assert manifest.shards("trainer") == 3 and manifest.shards("recorder") == 0
    files = [entry for entry in manifest.files if entry.part == "trainer"]
    assert [entry.name for entry in files] == [f"trainer-{rank:05d}-of-00003.safetensors" for rank in range(3)]
    pieces = [entry.specs["model/w"] for entry in files]
    assert [(spec.offset, spec.shape, spec.whole) for spec in pieces] == [
        ((0,), (334,), (1000,)),
        ((334,), (334,), (1000,)),
        ((668,), (332,), (1000,)),
    ]


def test_a_missing_rank_is_refused_before_anything_is_written(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    real = rig.trainer.snapshot

    def without_one() -> Any:
        taken = real()
        return type(taken)(shards=[taken.shards[0], taken.shards[2]], extra=taken.extra, release=taken.release)

    monkeypatch.setattr(rig.trainer, "snapshot", without_one)
    said = r"the part trainer: .* in its 2 shard\(s\) do not make whole tensors: .*first missing at \[334\]"
    with pytest.raises(CheckpointError, match=said):
        rig.restore()
    with pytest.raises(CheckpointError, match="is a rank missing"):
        rig.run(2)
    assert rig.names() == [] and rig.trainer.held == 0


@pytest.mark.parametrize("now", [0, 1, 2, 3, 5])
def test_any_number_of_ranks_resumes_and_a_change_is_told(make_rig: MakeRig, now: int) -> None:
    make_rig().run(4)
    rig = make_rig(of=now, attempt=2)
    rig.restore()
    assert rig.is_at(4)
    told = [event.text for event in rig.events if isinstance(event, Notice) and "was saved by 3 ranks" in event.text]
    assert len(told) == (now != 3)
    assert all(f"resumed on {max(now, 1)} rank" in text for text in told)
    rig.run(6)
    assert rig.is_at(6)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ((4, 2), (4, 2), ""),
        ((4, 2), (2, 1), "saved by 4 ranks in 2 replicas, resumed on 2 ranks: "),
        ((2, 1), (4, 2), "saved by 2 ranks, resumed on 4 ranks in 2 replicas: "),
        ((4, 2), (4, 1), "saved by 4 ranks in 2 replicas, resumed on 4 ranks: "),
        ((2, 2), (1, 1), "saved by 2 ranks in 2 replicas, resumed on 1 rank: "),
    ],
)
def test_replicas_write_fewer_files_than_there_are_ranks_and_a_change_of_either_is_told(
    make_rig: MakeRig, before: tuple[int, int], now: tuple[int, int], said: str
) -> None:
    make_rig(of=before[0], replicas=before[1]).run(2)
    rig = make_rig(of=now[0], replicas=now[1], attempt=2)
    rig.restore()
    told = [event.text for event in rig.events if isinstance(event, Notice) and "was saved by" in event.text]
    assert len(told) == bool(said) and all(said in text for text in told)


def test_what_an_earlier_version_saved_was_of_one_rank() -> None:
    assert ranks_in_words({"updates": 3}) == ranks_in_words({"ranks": 1, "replicas": 1}) == "1 rank"


def test_a_sleeping_trainer_of_ranks_is_saved_without_a_lease(make_rig: MakeRig) -> None:
    rig = make_rig(every=0)
    rig.step()
    rig.trainer.sleep()
    rig.manager.save(rig.state)
    assert rig.residency.leases == [] and rig.statuses("durable") == [1]


def test_room_is_that_of_all_shards_together(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.run(2)
    event = next(event for event in rig.events if getattr(event, "status", "") == "staged")
    files = (rig.folder / "step-00000002").iterdir()
    assert event.bytes == sum(path.stat().st_size for path in files if path.name != MANIFEST)
