"""A trainer in pieces: killed at every call and at every fault point, resumed by other numbers of ranks, equal."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_kill_on_fakes import KillAt, Killed, without_attempt
from tidemill.contracts.events import Notice
from tidemill.faults import armed, passed
from tidemill.loops import sync
from tidemill.testing.fakes.layouts import InShards, Layout, Whole
from tidemill.testing.fakes.parts import FakeRun, fake_parts

QUESTIONS = ("emit", "resident", "footprint", "host_bytes")
LAYOUTS: list[Layout] = [InShards(1), InShards(2), InShards(3)]


def outcome(run: FakeRun, watch: KillAt) -> tuple[Any, ...]:
    """Run to the end; everything that must depend neither on kills nor on how many ranks there were."""
    parts = fake_parts(run, watch)
    state = sync.run(parts, steps=run.steps)
    with parts.residency.awake(parts.trainer):
        trainer: Any = parts.trainer
        arrays = {name: array.tobytes() for name, array in trainer.device.items()}
    saved = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    return without_attempt(state), arrays, run.lines, saved


class KillAtChange(KillAt):
    """Passes over the calls that only ask or tell: that those may kill is tested with a trainer in one piece."""

    def __call__(self, name: str) -> None:
        if name.rpartition(".")[2] not in QUESTIONS:
            super().__call__(name)


def sharded(base: Path, name: str, layout: Layout) -> FakeRun:
    """A new run of five steps."""
    path = base / name
    path.mkdir()
    return FakeRun(path, steps=5, warm_up_steps=1, layout=layout)


def let_the_writer_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join(10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Of a run that was never killed and lay in one process."""
    return outcome(sharded(tmp_path_factory.mktemp("base"), "whole", Whole()), KillAt(0))


def test_a_run_of_ranks_killed_at_any_call_and_resumed_by_others_ends_as_one_never_killed(
    tmp_path: Path, whole: tuple[Any, ...]
) -> None:
    never = KillAtChange(0)
    assert outcome(sharded(tmp_path, "never", InShards(2)), never) == whole
    later = itertools.cycle(itertools.product(("sync", "async"), LAYOUTS))
    for nth in range(1, len(never.calls) + 1):
        run = sharded(tmp_path, f"killed-{nth}", InShards(2))
        run.mode, layout = next(later)
        with pytest.raises(Killed):
            outcome(run, KillAtChange(nth))
        let_the_writer_end()
        run.layout = layout
        assert outcome(run, KillAt(0)) == whole, f"killed {never.calls[nth - 1]} (call {nth})"


def die_in_child(run: FakeRun, fault: str) -> int:
    """The exit status of a process that runs with `fault` armed; what it recorded does not outlive it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        with armed(fault):
            sync.run(fake_parts(run), steps=run.steps)
    finally:
        os._exit(0)


def test_a_run_of_ranks_killed_at_any_point_of_its_saves_ends_as_one_never_killed(
    tmp_path: Path, whole: tuple[Any, ...]
) -> None:
    with passed() as names:
        run = sharded(tmp_path, "never", InShards(3))
        assert outcome(run, KillAt(0)) == whole
    counts = {name: names.count(name) for name in names}
    assert counts["checkpoint.open"] == 3 * counts["checkpoint.rename"] == 9
    later = itertools.cycle(LAYOUTS)
    for name, count in counts.items():
        for nth in range(1, count + 1):
            run = sharded(tmp_path, f"{name}-{nth}", InShards(3))
            run.lines.update(whole[2])
            status = die_in_child(run, f"{name}=kill@{nth}")
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{name}@{nth}"
            run.layout = next(later)
            assert outcome(run, KillAt(0)) == whole, f"{name}@{nth}"


def test_a_run_resumed_on_another_number_of_ranks_says_so(tmp_path: Path) -> None:
    run = sharded(tmp_path, "run", InShards(2))
    outcome(run, KillAt(0))
    said = []
    for layout in (InShards(2), InShards(3), Whole()):
        run.layout = layout
        parts = fake_parts(run)
        sync.run(parts, steps=run.steps)
        recorder: Any = parts.recorder
        said.append([e.text for e in recorder.events if isinstance(e, Notice) and "was saved by" in e.text])
    assert said[0] == [] and said[1][0].startswith("trainer was saved by 2 ranks, resumed on 3 ranks: ")
    assert said[2][0].startswith("trainer was saved by 2 ranks, resumed on 1 rank: ")
