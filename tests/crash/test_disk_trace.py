"""What several processes did to a folder is traced, and what a power cut may leave of it is built from the trace.

Modules: tidemill.testing.disk_model, tidemill.testing.watched_folder.
"""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.campaign.disk_left import BLOCK, Replay, blocks
from tests.crash.campaign.disk_trace import LOG, DiskTrace, has_begun
from tests.testing.test_volatile_disk import Contents, everything, nothing, sync_folder, tree, write


def traced(run: Path, *jobs: Callable[[], object], kill_before: int = 0) -> Replay:
    """Each job in a process of its own, one after the other, all forked from one that traces."""

    def before(operation: int) -> None:
        if operation == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    def all_jobs() -> None:
        DiskTrace(run, run.with_name("trace"), before).begin()
        for job in jobs:
            in_child(job)

    in_child(all_jobs)
    return Replay(run.with_name("trace"))


def in_child(job: Callable[[], object]) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        job()
    finally:
        os._exit(0)


def left(replay: Replay, target: Path, choose: Callable[[int], int]) -> Contents:
    replay.leave(target, choose)
    return tree(target)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "old").mkdir(parents=True)
    (tmp_path / "run" / "old" / "a").write_bytes(b"what was there")
    return tmp_path / "run"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_all_that_was_done_is_what_is_there_and_nothing_is_lost_but_what_was_not_synced(
    run: Path, tmp_path: Path
) -> None:
    def first() -> None:
        write(run / "b", b"new", sync=True)
        sync_folder(run)
        append(run / "c", b"by Python's own open")
        append(run / "old" / "a", b", and more")

    def second() -> None:
        (run / "b").rename(run / "d")
        (run / "old" / "a").unlink()
        (run / "more").mkdir()

    replay = traced(run, first, second)
    assert not replay.unseen(run)
    wanted = {"c": b"by Python's own open", "d": b"new", "more": None, "old": None}
    assert left(replay, tmp_path / "all", everything) == tree(run) == wanted
    assert left(replay, tmp_path / "none", nothing) == {"b": b"new", "old": None, "old/a": b"what was there"}


def test_what_one_process_wrote_another_makes_durable(run: Path, tmp_path: Path) -> None:
    def other() -> None:
        descriptor = os.open(run / "b", os.O_RDONLY)
        os.fsync(descriptor)
        sync_folder(run)

    replay = traced(run, lambda: write(run / "b", b"new", sync=False), other)
    assert left(replay, tmp_path / "none", nothing)["b"] == b"new"


def test_what_was_done_behind_its_back_is_noticed(run: Path) -> None:
    replay = traced(run, lambda: (run / "seen").mkdir())
    (run / "unseen").mkdir()
    assert replay.unseen(run) == {"unseen"}


def test_an_operation_that_failed_was_none(run: Path, tmp_path: Path) -> None:
    replay = traced(run, lambda: (run / "old").rmdir())
    assert left(replay, tmp_path / "all", everything) == tree(run)


@pytest.mark.parametrize("operation", range(1, 8))
def test_a_process_that_is_killed_before_any_operation_leaves_a_trace_that_can_be_made(
    run: Path, tmp_path: Path, operation: int
) -> None:
    def job() -> None:
        write(run / "b", b"new", sync=True)
        sync_folder(run)
        (run / "b").rename(run / "c")
        (run / "old" / "a").unlink()
        (run / "old").rmdir()

    replay = traced(run, job, kill_before=operation)
    assert not replay.unseen(run)
    assert left(replay, tmp_path / "all", everything) == tree(run)
    assert ("b" in left(replay, tmp_path / "none", nothing)) == (operation > 4)


def test_a_trace_has_begun_once_all_that_was_there_is_noted(run: Path, tmp_path: Path) -> None:
    assert not has_begun(tmp_path / "trace")
    traced(run)
    assert has_begun(tmp_path / "trace")
    log = tmp_path / "trace" / LOG
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert not has_begun(tmp_path / "trace")


def test_a_torn_file_has_of_each_block_one_of_two_versions_and_keeps_what_was_durable(tmp_path: Path) -> None:
    dice = random.Random(3)
    durable, now = bytes([1]) * (2 * BLOCK + 100), bytes([1]) * (2 * BLOCK + 100) + bytes([2]) * 3 * BLOCK
    grown = {blocks(durable, now, dice.randrange) for _ in range(300)}
    assert len(grown) > 10 and all(found.startswith(durable) and len(found) <= len(now) for found in grown)
    written_over = {blocks(durable, bytes([3]) * len(durable), dice.randrange) for _ in range(300)}
    assert len(written_over) == 8 and all(len(found) == len(durable) for found in written_over)
    assert blocks(durable, now, nothing) == durable and blocks(durable, now, everything) == now
