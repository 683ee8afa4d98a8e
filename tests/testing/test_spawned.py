"""tidemill.testing.spawned, tidemill.cluster.worker and tidemill.cluster.calling: processes called as one."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill import faults
from tidemill.cluster import calling
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.workers import Place, WorkerGroup
from tidemill.errors import TrainerError, WorkerDiedError, WorkerError
from tidemill.testing.spawned import SpawnedGroup, spawned


class Service:
    """A service as simple as can be."""

    def __init__(self, place: Place, emit: Emit) -> None:
        self.place, self.emit = place, emit

    def where(self) -> tuple[int, int]:
        self.emit(Notice(text=f"asked {self.place.rank}"))
        return self.place.rank, self.place.ranks

    def add(self, one: int, other: int) -> int:
        return one + other

    def fail_on(self, rank: int) -> None:
        if rank == self.place.rank:
            raise TrainerError(f"cannot go on: rank {rank}")
        time.sleep(60)

    def surprise(self) -> None:
        faults.point("surprise")
        raise LookupError("nobody expects it")

    def die_on(self, rank: int) -> None:
        if rank == self.place.rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"


@pytest.fixture
def group() -> Iterator[SpawnedGroup]:
    made = spawned("trainer", 2, Service)
    yield made
    made.close()


def test_workers_answer_in_order_and_know_their_place(group: SpawnedGroup) -> None:
    checked: WorkerGroup = group
    assert checked.names == ("trainer-0", "trainer-1")
    assert group.call("where", deadline=10) == [(0, 2), (1, 2)]
    assert group.call_each("add", [(1, 2), (3, 4)], deadline=10) == [3, 7]


def test_a_pending_answer_may_be_an_argument(group: SpawnedGroup) -> None:
    three = group.start(0, "add", 1, 2)
    assert group.start(1, "add", three, 4).result(10) == 7


def test_control_is_answered_beside_a_call(group: SpawnedGroup) -> None:
    slow = group.start(0, "wait", 1.0)
    assert group.control(0, "add", 1, 1, deadline=0.9) == 2
    assert not slow.done()
    assert slow.result(10) == "done"


def test_the_first_failure_is_raised_with_its_worker_and_the_others_are_ended(
    group: SpawnedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "GRACE", 0.3)
    with pytest.raises(TrainerError, match="rank 1") as caught:
        group.call("fail_on", 1, deadline=30)
    notes = "\n".join(caught.value.__notes__)
    assert "in trainer-1" in notes
    assert "trainer-0 waited for it in vain" in notes


def test_a_death_is_told_before_what_the_others_made_of_it(group: SpawnedGroup) -> None:
    with pytest.raises(WorkerDiedError, match="trainer-1 died") as caught:
        group.call("die_on", 1, deadline=30)
    assert "trainer-0 then failed too" in "\n".join(caught.value.__notes__)


def test_an_unexpected_exception_becomes_a_worker_error_with_its_traceback(group: SpawnedGroup) -> None:
    with pytest.raises(WorkerError, match="trainer-0 on .* failed: LookupError: nobody expects it") as caught:
        group.call("surprise", deadline=10)
    assert "in surprise" in caught.value.__notes__[0]


def test_a_worker_that_does_not_answer_is_named_and_all_are_ended(group: SpawnedGroup) -> None:
    with pytest.raises(WorkerError, match="trainer-1 did not answer 'wait'"):
        group.call_each("wait", [(0.0,), (60.0,)], deadline=0.5)
    with pytest.raises(WorkerError):
        group.call("where", deadline=5)


def test_a_killed_worker_is_named_at_once(group: SpawnedGroup) -> None:
    pending: Any = [group.start(0, "wait", 30.0), group.start(1, "wait", 30.0)]
    os.kill(group.pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="trainer-1 died"):
        pending[1].result(20)
    assert time.monotonic() - began < 5


def test_a_fault_point_counts_in_the_process_that_it_names() -> None:
    group = spawned("trainer", 2, Service, fault_text="trainer-1/surprise=kill,surprise=kill")
    try:
        with pytest.raises(WorkerError, match="trainer-0 on .* failed: LookupError"):
            group.start(0, "surprise").result(10)
        with pytest.raises(WorkerError, match="trainer-1 died"):
            group.start(1, "surprise").result(10)
    finally:
        group.close()
