"""Kill the run at every call to any part, start it again, and compare with a run that was never killed."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill.contracts.state import RunState
from tidemill.loops import sync
from tidemill.testing.fakes.parts import FakeRun, fake_parts


class Killed(BaseException):
    """Not an Exception: nothing in the program may catch it, as nothing catches SIGKILL."""


class KillAt:
    """Counts the loop's calls and kills at the n-th; `calls` names them. The writer's thread dies with a process only:
    its kills are tested on processes."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.calls: list[str] = []

    def __call__(self, name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.calls.append(name)
        if len(self.calls) == self.nth:
            raise Killed(name)


def outcome(run: FakeRun, watch: KillAt) -> tuple[Any, ...]:
    """Run to the end; everything that must not depend on whether the run was killed."""
    parts = fake_parts(run, watch)
    state = sync.run(parts, steps=run.steps)
    with parts.residency.awake(parts.trainer):
        tensors = {name: bytes(t.data) for name, t in parts.trainer.snapshot().tensors.items()}
    saved = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    return without_attempt(state), tensors, run.lines, saved


def killed(run: FakeRun, nth: int) -> None:
    """A start that is killed at its n-th call; what its writer had begun is done before the next start."""
    with pytest.raises(Killed):
        outcome(run, KillAt(nth))
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join(10)


def without_attempt(state: RunState) -> dict[str, Any]:
    return state.to_json() | {"attempt": None}


def folder(base: Path, name: str) -> Path:
    path = base / name
    path.mkdir()
    return path


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_killed_at_any_call_ends_as_one_never_killed(tmp_path: Path, mode: str) -> None:
    never = KillAt(0)
    wanted = outcome(FakeRun(folder(tmp_path, "whole"), mode=mode), never)
    assert len(wanted[2]) == 6
    for nth in range(1, len(never.calls) + 1):
        run = FakeRun(folder(tmp_path, f"killed-{nth}"), mode=mode)
        killed(run, nth)
        assert outcome(run, KillAt(0)) == wanted, f"killed {never.calls[nth - 1]} (call {nth})"


def test_a_run_killed_again_and_again_ends_as_one_never_killed(tmp_path: Path) -> None:
    wanted = outcome(FakeRun(folder(tmp_path, "whole")), KillAt(0))
    run = FakeRun(folder(tmp_path, "killed"))
    for nth in (60, 45, 5, 80, 33, 71):
        killed(run, nth)
    assert outcome(run, KillAt(0)) == wanted


def test_a_finished_run_started_again_does_no_step(tmp_path: Path) -> None:
    run = FakeRun(folder(tmp_path, "run"))
    wanted = outcome(run, KillAt(0))
    again = KillAt(0)
    assert outcome(run, again) == wanted
    assert not [call for call in again.calls if "FakeTrainer.step" in call]
