"""tidemill.cluster.calling and tidemill.cluster.words: who is named when calls to several workers go wrong."""

import time
from typing import Any

import pytest
from tests.cluster.meeting_rank import WAIT, MeetingRank

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.cluster import calling
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.words import doing
from tidemill.contracts.footprint import Part
from tidemill.errors import RankMissingError, TrainerError, WorkerDiedError, WorkerError
from tidemill.testing.suites.trainer import awake, ragged_batch

HASTY = Deadlines(work=20.0, transition=1.5)


class Outcome:
    """An answer that is there after `seconds`: a value, or what it raises."""

    def __init__(self, outcome: object, seconds: float = 0.0) -> None:
        self.outcome, self.at = outcome, time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self.at

    def result(self, deadline: float) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def gathered(*pending: Outcome, deadline: float = 0.3) -> tuple[list[Any], list[str]]:
    ended: list[str] = []
    names = [f"trainer-{rank}" for rank in range(len(pending))]
    values = calling.gather(
        pending,
        names=names,
        doing="sleep",
        setting="residency.deadline",
        deadline=deadline,
        wait=lambda some, seconds: time.sleep(0.01),
        end_all=lambda: ended.extend(names),
    )
    return values, ended


def test_values_come_in_the_order_of_the_workers() -> None:
    assert gathered(Outcome(1, 0.1), Outcome(2)) == ([1, 2], [])


def test_silent_workers_are_named_with_what_they_did_not_do_and_the_setting_that_ended_them() -> None:
    with pytest.raises(WorkerError) as caught:
        gathered(Outcome(1), Outcome(2, 60), Outcome(3, 60))
    assert str(caught.value) == (
        "trainer-1, trainer-2 did not sleep within 300 ms and were ended; see their logs for what they were doing, or "
        "raise residency.deadline if that is normal here"
    )
    with pytest.raises(WorkerError, match="trainer-0 did not sleep within 300 ms and was ended; see its log"):
        gathered(Outcome(1, 60), Outcome(2))


def test_whoever_others_waited_for_is_named_and_not_the_ones_who_waited() -> None:
    said = RankMissingError("trainer-0 on here: rank 1 of 2 did not come within 1 s; see logs")
    said.add_note("in trainer-0: its traceback")
    with pytest.raises(
        WorkerError,
        match=r"^trainer-1 did not sleep within .* and was ended \(trainer-0 on here: rank 1 of 2 did not come .* s\);",
    ) as caught:
        gathered(Outcome(said), Outcome(2, 60))
    assert caught.value.__notes__ == ["in trainer-0: its traceback"]


def test_what_failed_counts_more_than_who_waited_for_it_and_a_death_most(monkeypatch: pytest.MonkeyPatch) -> None:
    missing, refusal, death = RankMissingError("waited"), TrainerError("refused"), WorkerDiedError("died")
    with pytest.raises(TrainerError, match="refused") as caught:
        gathered(Outcome(missing), Outcome(refusal, 0.1))
    assert caught.value.__notes__ == ["trainer-0 then failed too: waited"]
    with pytest.raises(WorkerDiedError):
        gathered(Outcome(missing), Outcome(TrainerError("refused")), Outcome(death, 0.1))
    monkeypatch.setattr(calling, "GRACE", 0.1)
    with pytest.raises(TrainerError) as caught:
        gathered(Outcome(TrainerError("refused")), Outcome(1, 60), deadline=30)
    assert caught.value.__notes__ == ["trainer-1 waited for it in vain and was ended"]


def test_nobody_is_waited_for_long_once_a_worker_has_died() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDiedError):
        gathered(Outcome(WorkerDiedError("died")), Outcome(1, 60), deadline=30)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("point", "words"), [("groups.park", "park"), ("worker.park", "park"), ("worker.revive", "revive")]
)
def test_a_rank_that_hangs_while_process_groups_park_or_revive_is_named_by_the_driver_and_by_the_others(
    two_ranks: Any, point: str, words: str
) -> None:
    trainer = two_ranks(MeetingRank, faults=f"trainer-1/{point}=delay:30", deadlines=HASTY)
    with pytest.raises(
        WorkerError,
        match=f"trainer-1 did not {words} process groups within .*rank 1 of 2 did not come.*raise residency.deadline",
    ):
        for _ in range(2):
            trainer.sleep()
            trainer.wake_up(Part.ALL)


def test_a_rank_that_hangs_in_a_step_is_named_when_the_others_collective_gives_up(
    two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "GRACE", 0.5)
    trainer = two_ranks(MeetingRank, faults="trainer-1/meeting.update=delay:30", deadlines=HASTY)
    began = time.monotonic()
    with awake(trainer):
        trainer.begin("rl")
        with pytest.raises(
            WorkerError, match="trainer-1 did not do a step within .*trainer-0 on .* waited for other ranks"
        ):
            trainer.step(ragged_batch(), ClipLoss(low=0.2, high=0.2))
    assert time.monotonic() - began < WAIT + 5


def test_calls_have_words() -> None:
    assert doing("wake_up") == "wake up"
    assert doing("something") == "answer 'something'"
