"""The copy that a sleep needs is begun where the update ends, once sleeps follow (`RankMemory.changed`)."""

import numpy as np
from tests.trainers.fsdp.conftest import MakeFsdpTrainer

from tidemill import faults
from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.events import Event, Transition
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.planning.budget import NO_LIMIT
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.trainer_case import awake, copied, ragged_batch, same

CLIP = ClipLoss(low=0.2, high=0.2)


def test_copying_begins_with_an_update_that_a_sleep_followed_the_last_time_and_with_no_other(
    make_fsdp_trainer: MakeFsdpTrainer,
) -> None:
    trainer = make_fsdp_trainer()
    begun = []
    with awake(trainer):
        trainer.begin("rl")
    for slept in (False, True, False, False):
        with awake(trainer), faults.passed() as points:
            trainer.step(ragged_batch(), CLIP)
        begun.append("residency.capture.slab" in points)
        if slept:
            trainer.sleep()
    assert begun == [False, False, True, False]


def test_training_on_after_a_copy_was_begun_has_the_bits_of_a_twin_and_saves_what_it_is_now(
    make_fsdp_trainer: MakeFsdpTrainer,
) -> None:
    one, twin = make_fsdp_trainer(), make_fsdp_trainer()
    for trainer in (one, twin):
        with awake(trainer):
            trainer.begin("rl")
    for seed in range(5):
        if seed % 2:
            one.sleep()
        with awake(one), awake(twin):
            batch = ragged_batch(seed=seed)
            assert one.step(batch, CLIP).metrics == twin.step(batch, CLIP).metrics
            if seed == 3:  # a begun copy, and then another change before any sleep
                one.step(batch, CLIP)
                twin.step(batch, CLIP)
            assert np.array_equal(one.log_probs(batch), twin.log_probs(batch))
            assert same(copied(one.snapshot()), copied(twin.snapshot()))


def test_a_beginning_that_fails_does_not_tear_the_step_and_the_sleep_makes_the_copy(
    make_fsdp_trainer: MakeFsdpTrainer,
) -> None:
    trainer = make_fsdp_trainer()
    with awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
    trainer.sleep()
    with awake(trainer):
        with faults.armed("residency.capture.slab=raise"):
            trainer.step(ragged_batch(seed=1), CLIP)
        before = {name: weight.clone() for name, weight in trainer.named_weights()}
    trainer.sleep()
    with awake(trainer):
        assert all((weight == before[name]).all() for name, weight in trainer.named_weights())
        trainer.step(ragged_batch(seed=2), CLIP)


def test_what_crossed_beside_other_work_is_told_apart_from_what_a_transition_took_its_seconds_for(
    make_fsdp_trainer: MakeFsdpTrainer,
) -> None:
    trainer, events = make_fsdp_trainer(), list[Event]()
    residency = LeaseManager(budget=NO_LIMIT, emit=events.append, deadline=5.0)
    state = trainer.footprint(Part.WEIGHTS | Part.OPTIMIZER)
    with residency.awake(trainer):
        trainer.begin("rl")
        trainer.step(ragged_batch(), CLIP)
    assert trainer.sleep() == Moved(copied=state), "no sleep had followed an update, so nothing was begun"
    with residency.awake(trainer):
        (wake,) = [event for event in events if isinstance(event, Transition)]
        assert (wake.copied, wake.beside, wake.gbps) == (0, state, 0.0), "it returns before its bytes are there"
        trainer.step(ragged_batch(seed=1), CLIP)
    assert trainer.sleep() == Moved(beside=state), "the copy was begun with the update"
