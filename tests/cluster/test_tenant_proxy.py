"""tidemill.cluster.tenant_proxy and tidemill.cluster.tenant_service: transitions that fail on one worker."""

import time
from typing import Any

import pytest

from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Tenant
from tidemill.errors import ResidencyError, WorkerError
from tidemill.testing.suites.trainer import awake, ragged_batch

HELD = Part.WEIGHTS | Part.OPTIMIZER | Part.GRADS


def parts_on(trainer: Any) -> list[Part]:
    """What each worker itself says is on its device."""
    return [used.resident for used in trainer.group.call("use", Part.NONE, "stand", deadline=10)]


def test_a_proxy_has_the_name_and_footprint_of_its_workers(two_ranks: Any) -> None:
    trainer: Tenant = two_ranks()
    assert trainer.name == "trainer"
    assert trainer.footprint(Part.ALL) == 350
    assert trainer.resident() & HELD == HELD


def test_when_one_of_two_fails_to_wake_the_other_is_put_back_and_the_next_try_works(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.wake_up=raise")
    trainer.sleep()
    with pytest.raises(WorkerError, match="trainer-1 on .* failed: FaultInjected"):
        trainer.wake_up(Part.ALL)
    assert trainer.resident() == Part.NONE
    assert parts_on(trainer) == [Part.NONE, Part.NONE]
    with awake(trainer):
        trainer.log_probs(ragged_batch())
    assert parts_on(trainer) == [HELD, HELD]


def test_when_one_of_two_fails_to_sleep_the_other_is_woken_and_the_next_try_works(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-0/fake.sleep=raise")
    with pytest.raises(WorkerError, match="trainer-0 on .* failed: FaultInjected"):
        trainer.sleep()
    assert trainer.resident() == HELD
    assert [HELD & parts for parts in parts_on(trainer)] == [HELD, HELD]
    with awake(trainer):
        trainer.log_probs(ragged_batch())
    trainer.sleep()
    assert parts_on(trainer) == [Part.NONE, Part.NONE]


def test_a_failed_wake_of_one_part_leaves_the_parts_that_were_awake(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.wake_up=raise@2")
    trainer.sleep()
    trainer.wake_up(Part.WEIGHTS)
    with pytest.raises(WorkerError):
        trainer.wake_up(Part.OPTIMIZER)
    assert trainer.resident() == Part.WEIGHTS
    assert parts_on(trainer) == [Part.WEIGHTS, Part.WEIGHTS]


def test_when_the_others_cannot_be_put_back_either_all_are_ended_and_it_is_said(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-0/fake.sleep=raise,trainer-1/fake.wake_up=raise")
    with pytest.raises(WorkerError, match="trainer-0 on .* failed") as caught:
        trainer.sleep()
    assert "could not be put back (trainer-1 on" in "\n".join(caught.value.__notes__)
    assert trainer.resident() == Part.NONE
    with pytest.raises(WorkerError, match="cannot reach trainer any more: .*trainer-0 on .* failed"):
        trainer.wake_up(Part.ALL)
    with pytest.raises(WorkerError, match="died"):
        parts_on(trainer)


def test_a_rank_that_dies_in_its_sleep_is_named_at_once(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.sleep=kill")
    began = time.monotonic()
    with pytest.raises(WorkerError, match="trainer-1 died"):
        trainer.sleep()
    assert time.monotonic() - began < 5
    assert trainer.resident() == Part.NONE
    with pytest.raises(WorkerError, match="trainer-1 died"):
        trainer.wake_up(Part.ALL)


def test_a_rank_that_hangs_in_its_sleep_is_named_at_the_deadline(two_ranks: Any) -> None:
    trainer = two_ranks(faults="trainer-1/fake.sleep=delay:60", deadlines=Deadlines(work=20.0, transition=0.5))
    began = time.monotonic()
    with pytest.raises(
        WorkerError,
        match="trainer-1 did not sleep within 500 ms and was ended; see its log .*, or raise residency.deadline",
    ):
        trainer.sleep()
    assert time.monotonic() - began < 5
    assert trainer.resident() == Part.NONE


def test_use_of_a_tenant_that_sleeps_is_refused_on_the_driver_even_with_the_gate_open(two_ranks: Any) -> None:
    trainer = two_ranks()
    trainer.sleep()
    trainer.gate.open(Part.ALL)
    with pytest.raises(ResidencyError, match="asleep"):
        trainer.log_probs(ragged_batch())
