"""Faults of kind A that are of saves: A01 and A09, over the real loop."""

from collections import Counter
from pathlib import Path

import pytest
from tests.residency.real_run import (
    SPAWNED,
    Watching,
    moves_of,
    prepare_learning,
    real_parts,
    saved_weights,
    weights_now,
)

from tidemill.contracts.events import CheckpointEvent, Memory, Transition
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.loops import sync

STEPS = 4
SHORT = (
    f"steps={STEPS}",
    "warm_up.steps=1",
    "checkpoint.every=1",
    "checkpoint.keep_last=10",
    "residency.offload=always",
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return prepare_learning(tmp_path)


def held(parts: Parts) -> int:
    return parts.trainer.footprint(parts.trainer.resident())


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("cluster", ["inline", "spawned"])
def test_a01_every_periodic_save_of_a_trainer_that_sleeps_by_itself_holds_the_weights_right_after_the_update(
    base: Path, mode: str, cluster: str
) -> None:
    """A01, the fault of the beginning: saved weights, sleep after the save, the next step; inline and over ranks."""
    seen, right = Watching(), {}
    words = (
        [] if cluster == "inline" else [SPAWNED, "trainer.ranks=2", "engine.replicas=1", "residency.park_groups=always"]
    )
    with real_parts(base, seen, *SHORT, f"checkpoint.mode={mode}", *words) as parts:
        seen.at_record = lambda step: right.update({step + 1: weights_now(parts)})
        sync.run(parts, steps=STEPS)
        assert held(parts) == 0, "after the last save the trainer sleeps: the engine looked at the result"
        moves = Counter(moves_of(seen.events, parts.trainer, parts.engine))
    assert list(right) == [1, 2, 3, 4]
    for step, weights in right.items():
        assert saved_weights(base, step) == weights, step
    assert right[3] != right[4]
    # No save woke it: it sleeps once for each rollout and the last look, and wakes once for each update.
    assert (moves["trainer.sleep"], moves["trainer.wake_up(weights, optimizer, grads)"]) == (STEPS, STEPS - 1)


def test_a01_after_each_save_the_trainer_goes_to_sleep_while_the_save_may_go_on(base: Path) -> None:
    """A01: in the order of events, staged, asleep, awake for the next step."""
    seen = Watching()
    with real_parts(base, seen, *SHORT) as parts:
        sync.run(parts, steps=STEPS)
    said = [
        event.status if isinstance(event, CheckpointEvent) else event.what.partition("(")[0]
        for event in seen.events
        if isinstance(event, CheckpointEvent | Transition)
    ]
    found = [word for word in said if word in ("staged", "trainer.sleep", "trainer.wake_up")]
    assert found == ["staged", "trainer.sleep", *["trainer.wake_up", "staged", "trainer.sleep"] * (STEPS - 1)]


def test_a09_a_save_while_the_engine_is_awake_brings_nothing_to_the_device_and_leaves_the_engine_as_it_was(
    base: Path,
) -> None:
    """A09: in a budget below trainer and engine, asleep and in the middle of a hand-over alike."""
    seen = Watching()
    with real_parts(base, seen, *SHORT[:2], "checkpoint.every=0", "residency.offload=always") as parts:
        trainer, engine, manager = parts.trainer, parts.engine, parts.checkpointer
        together = trainer.footprint(Part.ALL) + engine.footprint(Part.ALL)
        state = sync.run(parts, steps=2)
        with parts.residency.awake(engine):
            before = engine.resident(), engine.version, parts.residency.transitions()
            manager.save(state)
            assert (engine.resident(), engine.version, parts.residency.transitions()) == before
        manager.drain()
        state = sync.step(parts, state)
        # The trainer is awake and changed, and the engine's weights lie beside it.
        with parts.residency.awake(engine, Part.WEIGHTS):
            before = engine.resident(), engine.version, parts.residency.transitions()
            manager.save(state)
            assert (engine.resident(), engine.version, parts.residency.transitions()) == before
        manager.drain()
        fullest = [(sum(event.device.values()), event.budget) for event in seen.events if isinstance(event, Memory)]
    assert all(size <= budget < together for size, budget in fullest)
    assert saved_weights(base, 2) != saved_weights(base, 3)
