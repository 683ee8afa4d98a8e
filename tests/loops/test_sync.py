"""The loop on fakes (`tidemill.loops.sync`, `.warm_up`, `.interruption`): who is awake when, and what a signal does."""

from pathlib import Path
from typing import Any

import pytest

from tidemill.contracts.parts import Parts
from tidemill.errors import Interrupted, ResidencyError
from tidemill.loops import interruption, sync, warm_up
from tidemill.testing.fakes.parts import FakeRun, fake_parts


def moves(parts: Parts) -> tuple[list[str], list[str]]:
    trainer: Any = parts.trainer
    engine: Any = parts.engine
    return trainer.moves, engine.moves


def test_trainer_sleeps_and_wakes_once_a_step_whatever_is_done_with_it(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, steps=6, warm_up_steps=2, every=1)
    parts = fake_parts(run)
    sync.run(parts, steps=6)
    trainer, engine = moves(parts)
    # Four rollouts and the final evaluation: the trainer sleeps for each, and wakes for the four updates.
    assert trainer == ["wake_up weights, optimizer", "sleep"] * 5
    assert engine == ["wake_up weights", "wake_up kv cache", *["sleep", "wake_up weights", "wake_up kv cache"] * 4]


def test_with_room_for_both_nothing_ever_sleeps(tmp_path: Path) -> None:
    parts = fake_parts(FakeRun(tmp_path, budget=10_000))
    sync.run(parts, steps=6)
    assert moves(parts) == (["wake_up weights, optimizer"], ["wake_up weights", "wake_up kv cache"])


def test_a_budget_below_the_handover_is_refused_with_the_ledger(tmp_path: Path) -> None:
    parts = fake_parts(FakeRun(tmp_path, budget=350))
    with pytest.raises(ResidencyError, match="engine.*trainer"):
        sync.run(parts, steps=6)


def test_the_result_does_not_depend_on_who_sleeps(tmp_path: Path) -> None:
    runs = [FakeRun(tmp_path / str(budget), budget=budget) for budget in (500, 10_000)]
    for run in runs:
        run.folder.mkdir()
        sync.run(fake_parts(run), steps=6)
    assert runs[0].lines == runs[1].lines


@pytest.mark.parametrize("when", range(6))
def test_a_signal_saves_the_present_state_and_the_run_goes_on_from_it(tmp_path: Path, when: int) -> None:
    whole = FakeRun(tmp_path / "whole", every=0)
    stopped = FakeRun(tmp_path / "stopped", every=0)
    for run in (whole, stopped):
        run.folder.mkdir()
    wanted = sync.run(fake_parts(whole), steps=6)

    updates = []

    def watch(name: str) -> None:
        updates.extend([name] if name == "after FakeTrainer.step" else [])
        if len(updates) == when:
            stop.request(Interrupted("stopped by a test"))

    parts = fake_parts(stopped, watch)
    stop: Any = parts.stop
    watch("start")
    with pytest.raises(Interrupted):
        sync.run(parts, steps=6)
    again = fake_parts(stopped)
    state = sync.run(again, steps=6)
    assert (state.step, state.cursor) == (wanted.step, wanted.cursor)
    assert stopped.lines == whole.lines


def test_evaluation_sees_the_weights_of_its_step(tmp_path: Path) -> None:
    parts = fake_parts(FakeRun(tmp_path))
    sync.run(parts, steps=6)
    evaluation: Any = parts.evaluation
    assert evaluation.done == [2, 4, 6]


def test_warm_up_returns_at_once_when_its_steps_are_done(tmp_path: Path) -> None:
    parts = fake_parts(FakeRun(tmp_path, warm_up_steps=0))
    state = parts.fresh_state()
    assert warm_up.run(parts, state) is state
    with pytest.raises(ValueError), interruption.saved_when_interrupted(parts, state):
        raise ValueError("no signal: nothing is saved")
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-")]
